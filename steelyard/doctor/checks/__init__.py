"""One file per topic. A check looks at a `Machine` and returns findings; it changes nothing."""
