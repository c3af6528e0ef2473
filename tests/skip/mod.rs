//! Tests of what is not installed everywhere.
#![forbid(unsafe_code)]

use std::io::Write;

/// Says that a test lacks `what`, and fails it where `CI` is `true`: there a test that did not run must not look like
/// one that passed. `RIMROCK_ALLOW_SKIP` lists what may be missing even there.
pub fn skip(what: &str, why: &str) {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let allowed = variable("RIMROCK_ALLOW_SKIP").split(',').any(|allowed| allowed == what);
    assert!(
        variable("CI") != "true" || allowed,
        "without {what}: {why} (RIMROCK_ALLOW_SKIP={what} would let it be skipped)"
    );
    println!("SKIPPED without {what}: {why}");
    let log = std::env::var_os("RIMROCK_SKIP_LOG");
    if let Some(mut log) =
        log.and_then(|log| std::fs::File::options().create(true).append(true).open(log).ok())
    {
        writeln!(log, "without {what}: {why}").unwrap();
    }
}
