"""The numbers of a run: written down, shown, drawn, and watched."""
