"""What `faults.py` is made of; tests inject single faults with it, too."""
