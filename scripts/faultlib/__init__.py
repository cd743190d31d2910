"""Parts of `faults.py`; tests inject single faults with them, too."""
