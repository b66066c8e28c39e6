"""The viewer: shows a run in the browser, during training and afterwards."""
