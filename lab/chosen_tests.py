import os
def pytest_collection_modifyitems(config, items):
    ids = [l.strip() for l in open(os.environ["CHOSEN_TESTS"]) if l.strip()]
    rank = {x: i for i, x in enumerate(ids)}
    gone = [x for x in items if x.nodeid not in rank]
    kept = sorted((x for x in items if x.nodeid in rank), key=lambda x: rank[x.nodeid])
    items[:] = kept
    if gone: config.hook.pytest_deselected(items=gone)
