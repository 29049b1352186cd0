"""What a model needs on a mesh of devices that need not be there, from shapes alone."""
