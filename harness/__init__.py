"""The harness: makes a case, runs every implementation on it, judges what came out and reports it."""
