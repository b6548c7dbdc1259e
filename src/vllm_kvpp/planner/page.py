"""The plan as one page of HTML that loads nothing: the charts, and what the terminal shows."""

from collections.abc import Iterator
from html import escape

from rich.console import Group
from rich.table import Table
from rich.text import Text

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1.5rem 0; font-variant-numeric: tabular-nums; }
caption { font-weight: 600; text-align: left; padding-bottom: .3rem; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: bottom; }
.right { text-align: right; }
p { margin: .3rem 0; white-space: pre-line; }
"""


def make_page(title: str, report: Group, svg: str) -> str:
    """Put the charts and every table and sentence of the report into one document."""
    body = "\n".join(_write_parts(report))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{_strip_prolog(svg)}\n{body}\n</body>\n</html>\n"
    )


def _strip_prolog(svg: str) -> str:
    """Only the element: a declaration and a DOCTYPE belong to a file of its own."""
    return svg[svg.index("<svg") :].rstrip()


def _write_parts(report: Group) -> Iterator[str]:
    for part in report.renderables:
        if isinstance(part, Table):
            yield _write_table(part)
        elif isinstance(part, Text) and part.plain:
            yield f"<p>{escape(part.plain.strip())}</p>"


def _write_table(table: Table) -> str:
    classes = [' class="right"' if column.justify == "right" else "" for column in table.columns]
    headers = [_write_cell("th", column.header, of) for column, of in zip(table.columns, classes, strict=True)]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = [[_write_cell("td", cell, of) for cell, of in zip(row, classes, strict=True)] for row in rows]
    lines = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in (headers, *body))
    return f"<table>\n<caption>{escape(str(table.title))}</caption>\n{lines}\n</table>"


def _write_cell(tag: str, content: object, of: str) -> str:
    return f"<{tag}{of}>{escape(str(content)).replace(chr(10), '<br>')}</{tag}>"
