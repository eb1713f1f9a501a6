"""The page of `mrl view --follow`: it shows a run, several runs or a service while they go on.

A thread looks at the files a few times a second and reads only what is new. A server on loopback gives
a browser the page with everything so far, and then the changes as server-sent events.

tail.py       the new lines of a file that grows, is replaced, cut or removed
growing.py    curves of bounded size, to which rows are added
run_files.py  the rows, evaluations, recipe and timeline of a run folder
status.py     what a run is doing, and whether it is alive
samples.py    the samples of a step, and one of them as a conversation
turns.py      the turns, thoughts and tool calls of a conversation
feed.py       the events of a page, for any number of browsers
pages.py      what each kind of page has: the base of run_page.py, service_page.py and compare_page.py
stream.py     the events as an HTTP answer that does not end
server.py     the addresses, the token, and the thread that looks at the files
"""
