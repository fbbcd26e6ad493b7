"""python -m gruyere: see _launch."""

from gruyere._launch import main

if __name__ == "__main__":
    main()
