"""What a run is judged on: prompt sets and the verdict whether speculation changed the text."""
