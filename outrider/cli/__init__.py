"""The command line: main.py and one leaf per verb. Nothing here imports torch before a verb runs."""
