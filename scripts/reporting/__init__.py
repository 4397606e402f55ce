"""The page of `areal-like report`: `contents` reads a run's folder; `page.js` draws the page in the browser."""
