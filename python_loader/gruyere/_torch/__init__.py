"""What changes in torch while Gruyère serves it: its functions are wrapped here, a file each."""
