"""The parts of `scripts.report`: a run's files → the contents of a page → one HTML file, or a live server.

    series    metrics of any number of train steps, in a bounded number of buckets
    excerpts  which samples the page shows, token by token
    contents  everything the page shows of a run
    several   which runs are meant, what tells them apart, and how they compare
    page      the page: template, style, scripts and data in one file
    live      a server for the page of a live run

The page itself is in `page.html`, `page.css` and the `.js` files. Everything that the model or the user wrote reaches
it as JSON data, and the scripts put it into the page as text, never as HTML.
"""
