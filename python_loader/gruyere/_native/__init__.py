"""libgruyere.so: finding and loading it, its configuration, and the native door's shim."""
