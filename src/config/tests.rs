#![forbid(unsafe_code)]

use super::*;

const SAMPLE: &str = include_str!("../../config/rimrock.toml");

/// The sample with its commented-out settings (`#key = …`, no blank after the mark) switched on.
fn full_sample() -> String {
    let lines = SAMPLE.lines().map(|line| match line.strip_prefix('#') {
        Some(setting) if !setting.starts_with(' ') && !setting.is_empty() => setting,
        _ => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_sample_as_it_stands_is_the_default() {
    assert_eq!(parse(SAMPLE).unwrap(), Config::default());
}

#[test]
fn the_sample_with_everything_switched_on_is_valid() {
    let config = parse(&full_sample()).unwrap();
    assert!(!config.device.is_empty() && !config.pool.is_empty() && !config.subsystem.is_empty());
}

#[test]
fn the_sample_documents_every_key() {
    let full: toml::Table = full_sample().parse().unwrap();
    let mut sections = 0;
    for (section, value) in &full {
        let (header, entry) = match value {
            toml::Value::Array(entries) => (format!("[[{section}]]"), &entries[0]),
            table => (format!("[{section}]"), table),
        };
        let error = parse(&format!("{header}\nzzzzzzzz = 1")).unwrap_err();
        // "unknown field `zzzzzzzz`, expected one of `cores`, `poll`, `spin_us`"
        let keys: Vec<&str> = error.split('`').skip(1).step_by(2).skip(1).collect();
        assert!(!keys.is_empty(), "{error}");
        for key in keys {
            assert!(entry.get(key).is_some(), "config/rimrock.toml does not document {header} {key}");
        }
        sections += 1;
    }
    let error = parse("zzzzzzzz = 1").unwrap_err();
    assert_eq!(error.split('`').skip(1).step_by(2).count() - 1, sections, "a section is missing: {error}");
}

#[test]
fn unknown_keys_are_refused_with_the_nearest_known_one() {
    for (text, line, meant) in [
        ("[target]\nlistn = \"0.0.0.0:4420\"", "line 2", "`listen`"),
        ("\n[reactr]\n", "line 2", "`reactor`"),
        ("[reactor]\npoll = \"buzy\"", "line 2", "`busy`"),
        ("[[device]]\nname = \"a\"\nurl = \"ram:1GiB\"", "line 3", "`uri`"),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains(line) && error.ends_with(&format!("did you mean {meant}?")), "{error}");
    }
}

#[test]
fn wrong_values_are_refused() {
    for text in [
        "[memory]\nbuffers = 5",
        "[memory]\nbuffers = \"many\"",
        "[target]\nlisten = \"localhost\"",
        "[reactor]\ncores = \"3-1\"",
        "[reactor]\ncores = [-1]",
        "[[pool]]\nname = \"p\"\ndevices = []",
        "[[device]]\nname = \"a\"\nuri = \"ram:1GiB\"\n[[device]]\nname = \"a\"\nuri = \"ram:1GiB\"",
        "[[subsystem]]\nnqn = \"nqn.2014-08.org.example:a\"\ndevices = [\"nothing\"]",
        "[[device]]\nname = \"a\"",
    ] {
        assert!(parse(text).is_err(), "{text}");
    }
}

#[test]
fn absurd_values_are_refused_and_say_what_would_do() {
    for (text, says) in [
        ("[memory]\nbuffers = \"512\"", "at least 36 MiB"),
        ("[memory]\npage_cache = \"1KiB\"", "at least 1 MiB"),
        ("[log]\nlevel = \"warning\"", "did you mean \"warn\"?"),
        ("[log]\nlevel = \"inf\"", "did you mean \"info\"?"),
        ("[log]\nlevel = \"info,rimrock::pool=debgu\"", "did you mean \"debug\"?"),
        ("[log]\nlevel = \"\"", "is not a level: trace, debug, info, warn, error, off"),
        ("[target]\nlisten = \"0.0.0.0:0\"", "port 0"),
        ("[[subsystem]]\nnqn = \"nqn.2014-08.org.example:a\"\ndevices = []\nlisten = [\"[::]:0\"]", "port 0"),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains(says), "{text}: {error}");
    }
    let config =
        parse("[memory]\nbuffers = \"36MiB\"\n[log]\nlevel = \"warn, rimrock::pool=trace\"").unwrap();
    assert_eq!((config.memory.buffers, config.log.level.as_str()), (36 << 20, "warn,rimrock::pool=trace"));
}

#[test]
fn cores_are_written_as_linux_writes_them() {
    assert_eq!(parse_cores("0").unwrap(), [0]);
    assert_eq!(parse_cores("1-3").unwrap(), [1, 2, 3]);
    assert_eq!(parse_cores("0, 2-3").unwrap(), [0, 2, 3]);
    for bad in ["", "a", "1-", "-1", "3-1", "1,1", "0-9999999", "1--2"] {
        assert!(parse_cores(bad).is_err(), "{bad}");
    }
}
