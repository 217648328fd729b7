"""Training of drafters: corpora, captured target states, the trainer whose checkpoint acceptance picks, exports."""
