"""The tables of the ledger's SQLite file, and the statements that write them.

Readable with any SQLite tool, also while the buffer runs:
`sqlite3 -readonly buffer.sqlite "SELECT state, COUNT(*) FROM items GROUP BY state"`

    items     item, row, epoch     number for life, row of the data set, pass over the data set
              state, reason        waiting, leased, stored, batched, trained, dropped, quarantined; why dropped, put
                                   into quarantine, or failed last
              version, server      dispatch version and server of the last lease
              lease, request       numbers of the last lease and of its Ask
              attempts             dispatches so far
              batch                its batch, also if taken out of it; dropped: the next batch then; else -1
              samples, tokens, sampled, truncated   sums over its group
              leased_at, stored_at, changed_at      Unix time
              bytes                size of its samples; 0 once removed
    samples   item, idx, tokens, sampled, reward, truncated
              segment, position, bytes   where in `buffer.sqlite-samples/SEGMENT.samples` (six digits) it is,
                                         as MessagePack of `buffer.wire.sample.Sample`
              crc32c                     CRC32C of those bytes; NULL: stored by a release that computed none
    segments  segment, size, live  bytes that count of each file, bytes that are still named
    batches   version, trained, formed_at, trained_at
    problems  row, problem, place  JSON of each dispatched problem, and where it is in its file
    rows      row, drawn, groups, samples, solved   by row of the data set: items, groups, samples, solved samples
              streak               groups in a row with all samples solved; negative: with none
              last_item, last_version   the item drawn last, and the next batch then
              failed, hopeless, reason  attempts that failed by the row, reward or task; 1 if one failed for good; why
    totals    what, which, groups, samples, tokens, sampled, truncated   sums, see `buffer/ledger/counts.py`
    meta      name, value          counters of the ledger, digest of the data, settings as JSON by key;
                                   `ledger`: a random name of this file, `commits`: how often it was committed
    evaluations  due, state, version, server   version when due; running, lost, done, failed; what was evaluated, where
              attempts, reason, results, samples, changed_at   claims; why given up; JSON by set: figures, answers
    changes   version, key, old, new, changed_at   settings that a new launch changed, and the version reached by then

`witness.py` keeps a CRC32C of each page of the file. After a change by hand a start needs `--accept-loss`.
"""

APPLICATION, SCHEMA = 0x48445243, 8
READABLE = (3, 4, 5, 6, 7, SCHEMA)
ROWS = """
CREATE TABLE rows (
    row INTEGER PRIMARY KEY, drawn INTEGER NOT NULL, groups INTEGER NOT NULL, samples INTEGER NOT NULL,
    solved INTEGER NOT NULL, streak INTEGER NOT NULL, last_item INTEGER NOT NULL, last_version INTEGER NOT NULL,
    failed INTEGER NOT NULL, hopeless INTEGER NOT NULL, reason TEXT NOT NULL
)"""
TABLES = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE problems (row INTEGER PRIMARY KEY, problem TEXT NOT NULL, place TEXT);
CREATE TABLE items (
    item INTEGER PRIMARY KEY, row INTEGER NOT NULL, epoch INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    version INTEGER NOT NULL, server TEXT NOT NULL, lease INTEGER NOT NULL, request INTEGER NOT NULL,
    attempts INTEGER NOT NULL, batch INTEGER NOT NULL, samples INTEGER NOT NULL, tokens INTEGER NOT NULL,
    sampled INTEGER NOT NULL, truncated INTEGER NOT NULL,
    leased_at REAL, stored_at REAL, changed_at REAL, bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX items_by_batch ON items (batch);
CREATE INDEX items_with_samples ON items (batch) WHERE bytes > 0;
CREATE TABLE samples (
    item INTEGER NOT NULL, idx INTEGER NOT NULL, tokens INTEGER NOT NULL, sampled INTEGER NOT NULL,
    reward REAL NOT NULL, truncated INTEGER NOT NULL,
    segment INTEGER NOT NULL, position INTEGER NOT NULL, bytes INTEGER NOT NULL, crc32c INTEGER,
    PRIMARY KEY (item, idx)
) WITHOUT ROWID;
CREATE TABLE segments (segment INTEGER PRIMARY KEY, size INTEGER NOT NULL, live INTEGER NOT NULL);
CREATE INDEX empty_segments ON segments (segment) WHERE live = 0;
CREATE TABLE batches (version INTEGER PRIMARY KEY, trained INTEGER NOT NULL, formed_at REAL, trained_at REAL);
CREATE TABLE totals (
    what TEXT NOT NULL, which TEXT NOT NULL, groups INTEGER NOT NULL, samples INTEGER NOT NULL, tokens INTEGER NOT NULL,
    sampled INTEGER NOT NULL, truncated INTEGER NOT NULL, PRIMARY KEY (what, which)
) WITHOUT ROWID;
{ROWS};
"""
MIGRATIONS = {
    3: "ALTER TABLE samples ADD COLUMN crc32c INTEGER",
    4: f"""
        ALTER TABLE problems ADD COLUMN place TEXT; {ROWS};
        INSERT INTO meta SELECT 'rows_since', value FROM meta WHERE name = 'next_item'
    """,
    5: "",
    6: "",
    7: "",
}
"""Schemas 6 to 8 only keep older releases from files that they cannot read or would damage."""
NO_PLACES = "CREATE TEMP VIEW problems AS SELECT *, NULL AS place FROM main.problems"
NO_ROWS = ROWS.replace("CREATE TABLE", "CREATE TEMP TABLE")
AS_NOW = {
    3: ("CREATE TEMP VIEW samples AS SELECT *, NULL AS crc32c FROM main.samples", NO_PLACES, NO_ROWS),
    4: (NO_PLACES, NO_ROWS),
}
"""Adds what an earlier file lacks, for readers."""
FIRST_COMMIT = "INSERT OR IGNORE INTO meta VALUES ('ledger', ?), ('commits', 0)"
NEXT_COMMIT = "UPDATE meta SET value = value + 1 WHERE name = 'commits'"
COMMITS = "SELECT (SELECT value FROM meta WHERE name = 'ledger'), value FROM meta WHERE name = 'commits'"
SCALARS = "SELECT name, value FROM meta WHERE typeof(value) = 'integer' AND name <> 'commits'"
ITEM = """
INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)
ON CONFLICT (item) DO UPDATE SET
    state = excluded.state, reason = excluded.reason, version = excluded.version, server = excluded.server,
    lease = excluded.lease, request = excluded.request, attempts = excluded.attempts, batch = excluded.batch,
    samples = excluded.samples, tokens = excluded.tokens, sampled = excluded.sampled, truncated = excluded.truncated,
    leased_at = CASE WHEN lease = excluded.lease THEN leased_at ELSE excluded.leased_at END,
    stored_at = CASE WHEN excluded.samples THEN COALESCE(stored_at, excluded.stored_at) END,
    changed_at = excluded.changed_at
"""
"""Values: those of `item_values`, then leased_at, stored_at, changed_at. Numbered parameters (?1) would raise in Python
3.14."""
ITEM_STATE = """
SELECT item, row, epoch, CASE state WHEN 'trained' THEN 'batched' ELSE state END, reason, version, server, lease,
    request, attempts, batch, samples, tokens, sampled, truncated FROM items
"""
KEPT = f"{ITEM_STATE} WHERE state NOT IN ('dropped', 'quarantined') AND (batch = -1 OR batch >= ?)"
CLOSED = f"{ITEM_STATE} WHERE item = ? AND state IN ('dropped', 'quarantined')"
UNTRAINED = "SELECT item, bytes FROM items WHERE bytes > 0 AND state IN ('stored', 'batched')"
BATCHED_SINCE = "SELECT item, bytes FROM items WHERE bytes > 0 AND batch >= ? AND state IN ('batched', 'trained')"
FAILED_ROWS = """
SELECT row, reason FROM items WHERE state IN ('waiting', 'dropped') AND samples = 0 AND reason <> ''
ORDER BY changed_at DESC, item DESC LIMIT ?
"""
VOID = "SELECT item FROM items WHERE bytes > 0 AND batch >= 0 AND batch < ? AND state <> 'quarantined'"
UNFORMED = "DELETE FROM batches WHERE version >= ?"
KNOWN = "SELECT 1 FROM problems WHERE row = ?"
ROW = f"INSERT OR REPLACE INTO rows VALUES ({', '.join('?' * 11)})"
KEPT_ROWS = "SELECT * FROM rows"
GROUP = "SELECT segment, position, bytes, crc32c FROM samples WHERE item = ? ORDER BY idx"
SAMPLE = "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
SEGMENT = """
INSERT INTO segments VALUES (?, ?, ?)
ON CONFLICT (segment) DO UPDATE SET size = MAX(size, excluded.size), live = live + excluded.live
"""
FREE = """
UPDATE segments SET live = live - (SELECT bytes FROM items WHERE item = ?)
WHERE segment = (SELECT segment FROM samples WHERE item = ? LIMIT 1)
"""
EMPTY = "SELECT segment FROM segments WHERE live = 0 AND segment <> ?"
TOTAL = "INSERT OR REPLACE INTO totals VALUES (?, ?, ?, ?, ?, ?, ?)"
BATCH = """
INSERT INTO batches VALUES (?, ?, ?, ?)
ON CONFLICT (version) DO UPDATE SET trained = excluded.trained, trained_at = excluded.trained_at
"""
TRAINED = """
UPDATE items SET state = CASE WHEN ? THEN 'trained' ELSE 'batched' END, changed_at = ?
WHERE batch = ? AND state IN ('batched', 'trained')
"""
EVALUATIONS = """
CREATE TABLE IF NOT EXISTS evaluations (
    due INTEGER PRIMARY KEY, state TEXT, version INTEGER, server TEXT, attempts INTEGER, reason TEXT, results TEXT,
    samples TEXT, changed_at REAL
)
"""
"""Made when a ledger is opened: earlier files have none."""
EVALUATION = "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
EVALUATED = "SELECT due, state, version, server, attempts, reason, results, '' FROM evaluations"
KEPT_SAMPLES = 20
"""Evaluations whose samples are kept: the newest, and the first."""
FORGET_SAMPLES = f"""
UPDATE evaluations SET samples = '' WHERE samples <> '' AND due <> (SELECT MIN(due) FROM evaluations) AND due NOT IN
    (SELECT due FROM evaluations WHERE state = 'done' ORDER BY due DESC LIMIT {KEPT_SAMPLES})
"""
CHANGES = "CREATE TABLE IF NOT EXISTS changes (version INTEGER, key TEXT, old TEXT, new TEXT, changed_at REAL)"
CHANGE = "INSERT INTO changes SELECT COALESCE(MAX(version) + 1, 0), ?, ?, ?, ? FROM batches WHERE trained"
