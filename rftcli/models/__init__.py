"""Models: loading, recomputing log-probs, proving them, exporting. Knows nothing of engines, recipes or process groups. This file stays empty."""
