"""The only package that touches vLLM: it translates and delegates, and decides nothing.

Importing it does no work and needs no vLLM; `symbols.py` lists every vLLM symbol that its modules touch.
"""
