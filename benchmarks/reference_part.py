"""The part of the reference platform that some benchmarks serve with, KVPP on and off alike.

vLLM's CPU platform turns prefix caching and chunked prefill off for MLA; this keeps them on.
"""

PLUGIN = "mla_cpu_reference"
ENVIRONMENT = {"MLA_CPU_REFERENCE": "chunked_prefill"}
