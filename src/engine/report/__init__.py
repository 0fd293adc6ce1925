"""HTML reports of run folders: one run, a sweep, several runs. They read files only, and load nothing from outside."""
