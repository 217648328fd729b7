"""Draft networks as they are trained, one file a method; drafters/ has the same networks as they are served."""
