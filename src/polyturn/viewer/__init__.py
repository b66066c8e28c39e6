"""The viewer: a run in the browser, while it trains and after."""
