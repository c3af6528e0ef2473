//! What earlier runs of the quickstart made, told apart from what the user made in the same pool since.
//!
//! Only what bears a name that the quickstart gives, belongs to its volume and is shown to nobody by anyone else may
//! be deleted again.
#![forbid(unsafe_code)]

use serde_json::Value;

/// The quickstart's pool.
pub const POOL: &str = "main";
/// Its volume.
pub const VOLUME: &str = "model";
/// Good checkpoints of one run; one bad one follows.
pub const CHECKPOINTS: u64 = 5;
/// Training steps between checkpoints.
pub const STEPS: u64 = 1000;
/// Checkpoints kept from earlier runs.
const KEPT: usize = 5;

/// A snapshot that an earlier run took.
#[derive(Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// Which checkpoint it holds.
    pub number: u64,
    /// Whether it is what a rollback replaced.
    pub is_bad: bool,
    /// Whether the run that took it also exported it.
    pub is_shown: bool,
    /// Whether the user exported it.
    is_used: bool,
}

/// The name of a checkpoint's snapshot.
pub fn snapshot_name(number: u64) -> String {
    format!("{VOLUME}@step-{}", number * STEPS)
}

/// The name under which a bad checkpoint is kept.
pub fn bad_name(number: u64) -> String {
    format!("{}-bad", snapshot_name(number))
}

/// The subsystem that shows a checkpoint read-only. Not the one that `volume export` makes, which is the user's.
pub fn read_only_nqn(number: u64) -> String {
    format!("nqn.2026-01.io.rimrock:quickstart:{VOLUME}-step-{}", number * STEPS)
}

/// A name for the clone of a checkpoint that no volume bears yet.
pub fn free_clone_name(volumes: &Value, number: u64) -> String {
    let stem = format!("finetune-{}", number * STEPS);
    let taken = |name: &String| objects(volumes).iter().any(|volume| volume["name"] == name.as_str());
    let numbered = (2_u64..).map(|count| format!("{stem}-{count}"));
    std::iter::once(stem.clone()).chain(numbered).find(|name| !taken(name)).unwrap_or(stem)
}

/// Clones of earlier runs that nobody exported and nobody wrote to.
pub fn unused_clones(volumes: &Value) -> Vec<String> {
    let is_unused = |volume: &&Value| {
        let number = volume["name"].as_str().and_then(|name| checkpoint(name.strip_prefix("finetune-")?));
        let untouched = volume["written"] == 0 && objects(&volume["exports"]).is_empty();
        untouched && number.is_some_and(|number| volume["parent"] == snapshot_name(number).as_str())
    };
    objects(volumes).iter().filter(is_unused).map(|volume| text(volume, "name")).collect()
}

/// The snapshots of earlier runs, oldest first.
pub fn snapshots(list: &Value) -> Vec<Snapshot> {
    let mut made: Vec<Snapshot> = objects(list).iter().filter_map(snapshot).collect();
    made.sort_unstable_by_key(|snapshot| snapshot.number);
    made
}

/// Those of `made` that make room for a new run: bad ones, and all but the newest few.
pub fn superseded(made: &[Snapshot]) -> impl Iterator<Item = &Snapshot> {
    let good = made.iter().filter(|snapshot| !snapshot.is_bad);
    let old = good.clone().count().saturating_sub(KEPT);
    let bad = made.iter().filter(|snapshot| snapshot.is_bad);
    bad.chain(good.take(old)).filter(|snapshot| !snapshot.is_used)
}

fn snapshot(object: &Value) -> Option<Snapshot> {
    let name = object["name"].as_str().filter(|_| object["volume"] == VOLUME)?;
    let step = name.strip_prefix(VOLUME)?.strip_prefix("@step-")?;
    let (step, is_bad) = step.strip_suffix("-bad").map_or((step, false), |step| (step, true));
    let number = checkpoint(step)?;
    let own = format!("{}/1", read_only_nqn(number));
    let exports = objects(&object["exports"]);
    Some(Snapshot {
        name: name.to_owned(),
        number,
        is_bad,
        is_shown: exports.iter().any(|export| *export == own.as_str()),
        is_used: exports.iter().any(|export| *export != own.as_str()),
    })
}

/// Which checkpoint a step belongs to; `None` for steps at which the quickstart takes none.
fn checkpoint(step: &str) -> Option<u64> {
    let number = step.parse::<u64>().ok().filter(|step| step.is_multiple_of(STEPS))? / STEPS;
    (number > 0 && (number * STEPS).to_string() == step).then_some(number)
}

fn objects(list: &Value) -> &[Value] {
    list.as_array().map_or(&[][..], Vec::as_slice)
}

fn text(object: &Value, member: &str) -> String {
    object[member].as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_user_made_is_not_taken_for_the_quickstarts() {
        let object = |name: &str, volume: &str| json!({ "name": name, "volume": volume, "exports": [] });
        let mut list: Vec<Value> = [
            "data@v1",
            "model@before-rollback-1",
            "model@step-1500",
            "model@step-0",
            "model@step-01000",
            "model@step-1000-better",
            "model@step-1000-bad-bad",
            "other@step-1000",
        ]
        .iter()
        .map(|name| object(name, name.split('@').next().unwrap()))
        .collect();
        list.push(object("model@step-1000", "renamed"));
        assert_eq!(snapshots(&Value::Array(list)), []);
    }

    #[test]
    fn old_and_bad_ones_go_unless_the_user_exported_them() {
        let export = |name: &str, nqn: &[String]| json!({ "name": name, "volume": VOLUME, "exports": nqn });
        let mut list: Vec<Value> = (1..=8).map(|number| export(&snapshot_name(number), &[])).collect();
        list.push(export(&bad_name(6), &[]));
        list[1] = export(&snapshot_name(2), &[format!("{}/1", read_only_nqn(2))]);
        list[2] = export(&snapshot_name(3), &["nqn.2026-01.io.rimrock:main:model@step-3000/1".to_owned()]);
        let made = snapshots(&Value::Array(list));
        let gone: Vec<(&str, bool)> =
            superseded(&made).map(|gone| (gone.name.as_str(), gone.is_shown)).collect();
        assert_eq!(
            gone,
            [("model@step-6000-bad", false), ("model@step-1000", false), ("model@step-2000", true)]
        );
    }

    #[test]
    fn clones_that_somebody_uses_stay_and_their_names_are_not_taken() {
        let clone = |name: &str, parent: &str, written: u64, exports: &[&str]| json!({ "name": name, "parent": parent, "written": written, "exports": exports });
        let volumes = json!([
            clone("finetune-1000", "model@step-1000", 0, &[]),
            clone("finetune-2000", "model@step-2000", 4096, &[]),
            clone("finetune-3000", "model@step-3000", 0, &["nqn/1"]),
            clone("finetune-4000", "data@v1", 0, &[]),
            clone("finetune-mine", "model@step-1000", 0, &[]),
        ]);
        assert_eq!(unused_clones(&volumes), ["finetune-1000"]);
        assert_eq!(free_clone_name(&volumes, 4), "finetune-4000-2");
        assert_eq!(free_clone_name(&volumes, 5), "finetune-5000");
    }
}
