"""What vLLM's CPU platform lacks to run every MLA feature: slow, plain code to compare with, never to serve with.

Off unless a part is switched on by name in the environment variable `MLA_CPU_REFERENCE`; see `parts.py`.
"""
