"""Speed, measured fairly: plain and speculative decoding of the same prompts in one process, in turns."""
