"""What happens in which order in one forward. Knows no vLLM."""
