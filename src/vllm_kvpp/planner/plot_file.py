"""The file of `--plot`: which forms there are, and what goes into them."""

from pathlib import Path

from vllm_kvpp.planner.charts import make_charts
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.page import make_page
from vllm_kvpp.planner.planning import Plan
from vllm_kvpp.planner.report import describe_setting, make_report

SUFFIXES = (".svg", ".png", ".html")


def check_plot(path: Path) -> None:
    """Find out before anything is planned whether charts can be drawn for a file of this name.

    Raises:
        PlannerError: the suffix is unknown, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise PlannerError(f"--plot is {str(path)[:80]!r}; name a file that ends with {', '.join(SUFFIXES)}.")
    try:
        import vllm_kvpp.planner.drawing  # noqa: F401 - whether it can be
    except ImportError as error:
        raise PlannerError(
            f"--plot needs matplotlib, which cannot be loaded ({str(error).splitlines()[0]}); pip install matplotlib, "
            "or leave --plot out."
        ) from error


def write_plot(plan: Plan, path: Path) -> None:
    """Draw the plan's charts into a file; an `.html` has its tables and sentences too, and needs no other file.

    Raises:
        PlannerError: the file cannot be written.
    """
    from vllm_kvpp.planner.drawing import draw

    is_page = path.suffix.lower() == ".html"
    form = "svg" if is_page else path.suffix.lower().removeprefix(".")
    heading = f"{plan.model.name}: {describe_setting(plan)}"
    content = draw(make_charts(plan), heading, form)
    if is_page:
        content = make_page(heading, make_report(plan), content.decode()).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PlannerError(
            f"--plot is {str(path)[:80]!r}, which cannot be written ({error.strerror}); name another file."
        ) from error
