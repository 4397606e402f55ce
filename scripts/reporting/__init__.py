"""The page of `areal-like report`: `contents` reads a run's folder, `page` puts data and scripts into one file, which
draws itself in the browser (`charts.js`, `samples.js`, `page.js`)."""
