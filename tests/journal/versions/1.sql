CREATE INDEX answers_by_owner ON answers (tenant, user, at);
CREATE INDEX answers_by_time ON answers (at);
CREATE UNIQUE INDEX members_by_message ON members (message, session);
CREATE INDEX messages_in_flight ON messages (pk) WHERE status = 'in_progress';
CREATE INDEX sessions_by_owner ON sessions (owner, updated_at);
CREATE TABLE answers (
        tenant TEXT NOT NULL,
        user TEXT NOT NULL,
        command TEXT NOT NULL,
        body BLOB NOT NULL,
        event BLOB NOT NULL,
        at REAL NOT NULL,
        checksum BLOB NOT NULL,
        PRIMARY KEY (tenant, user, command)
    );
CREATE TABLE members (
        session INTEGER NOT NULL REFERENCES sessions (pk),
        position INTEGER NOT NULL,
        message INTEGER NOT NULL REFERENCES messages (pk),
        checksum BLOB NOT NULL,
        PRIMARY KEY (session, position)
    ) WITHOUT ROWID;
CREATE TABLE messages (
        pk INTEGER PRIMARY KEY AUTOINCREMENT,
        owner INTEGER NOT NULL,
        id TEXT NOT NULL UNIQUE,
        parent TEXT,
        role TEXT NOT NULL,
        status TEXT NOT NULL,
        created_at REAL NOT NULL,
        content TEXT NOT NULL,
        is_answer INTEGER NOT NULL,
        prompt_ids BLOB NOT NULL,
        ids BLOB NOT NULL,
        details BLOB NOT NULL,
        checksum BLOB NOT NULL
    );
CREATE TABLE owners (
        pk INTEGER PRIMARY KEY,
        tenant TEXT NOT NULL,
        user TEXT NOT NULL,
        UNIQUE (tenant, user)
    );
CREATE TABLE scrubs (part INTEGER PRIMARY KEY);
CREATE VIRTUAL TABLE search_0 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_0_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_0_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_0_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_1 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE VIRTUAL TABLE search_10 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_10_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_10_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_10_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_11 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_11_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_11_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_11_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_12 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_12_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_12_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_12_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_13 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_13_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_13_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_13_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_14 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_14_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_14_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_14_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_15 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_15_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_15_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_15_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE TABLE 'search_1_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_1_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_1_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_2 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_2_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_2_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_2_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_3 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_3_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_3_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_3_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_4 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_4_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_4_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_4_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_5 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_5_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_5_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_5_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_6 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_6_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_6_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_6_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_7 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_7_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_7_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_7_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_8 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_8_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_8_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_8_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE VIRTUAL TABLE search_9 USING fts5 (text, content='', columnsize=0, detail=none, tokenize='trigram');
CREATE TABLE 'search_9_config'(k PRIMARY KEY, v) WITHOUT ROWID;
CREATE TABLE 'search_9_data'(id INTEGER PRIMARY KEY, block BLOB);
CREATE TABLE 'search_9_idx'(segid, term, pgno, PRIMARY KEY(segid, term)) WITHOUT ROWID;
CREATE TABLE sessions (
        pk INTEGER PRIMARY KEY AUTOINCREMENT,
        owner INTEGER NOT NULL REFERENCES owners (pk),
        id TEXT NOT NULL UNIQUE,
        title TEXT NOT NULL,
        updated_at REAL NOT NULL,
        pinned INTEGER NOT NULL,
        head TEXT,
        details BLOB NOT NULL,
        checksum BLOB NOT NULL
    );
CREATE TABLE sqlite_sequence(name,seq);
CREATE TABLE tokens_in_flight (
        message INTEGER NOT NULL REFERENCES messages (pk),
        start INTEGER NOT NULL,
        ids BLOB NOT NULL,
        checksum BLOB NOT NULL,
        PRIMARY KEY (message, start)
    ) WITHOUT ROWID;
CREATE TABLE usage (
        tenant TEXT NOT NULL,
        key_id TEXT NOT NULL,
        day TEXT NOT NULL,
        requests INTEGER NOT NULL,
        input_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        PRIMARY KEY (tenant, key_id, day)
    ) WITHOUT ROWID;
