//! `rimrock volume rollback` and `rimrock snapshot rollback`: which volume, to which snapshot.
//!
//! A snapshot knows the volume that it was taken of, whatever either is called by now. Names alone would go wrong: a
//! volume that was renamed keeps its snapshots, and another may bear its old name.
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::output::print_done;
use super::{Common, Failure};
use serde_json::Value;

/// Help of both commands.
pub const ROLLBACK_HELP: &str =
    "What the volume holds now is kept as a snapshot first, so that a rollback can
itself be rolled back. Unmount the file system on the host before, and mount it again after.

Examples:
  rimrock volume rollback model step-1000
  rimrock snapshot rollback model@step-1000 --keep model@bad-run
  rimrock snapshot rollback model@step-1000 --discard";

/// What becomes of what a rollback replaces.
#[derive(Debug, clap::Args)]
pub struct Keep {
    /// Keep what is replaced under this name (default: VOLUME@before-rollback-N)
    #[arg(long, value_name = "SNAPSHOT")]
    keep: Option<String>,
    /// Keep nothing of what is replaced
    #[arg(long, conflicts_with = "keep")]
    discard: bool,
    /// Take a snapshot of another volume, whose size and content this one gets
    #[arg(long)]
    foreign: bool,
}

/// Makes the volume what the snapshot was; without a volume, the one that the snapshot was taken of.
pub fn rollback(common: &Common, volume: Option<&str>, snapshot: &str, keep: Keep) -> Result<(), Failure> {
    let (volume, snapshot) = match volume {
        Some(volume) => {
            let volume = call(common, "volume_get", Arguments::new().with("name", volume))?;
            let snapshot = snapshot_of(common, &volume, snapshot)?;
            (place(&volume, "name"), snapshot)
        }
        None => {
            let taken = call(common, "snapshot_get", Arguments::new().with("name", snapshot))?;
            if taken["volume"].is_null() {
                return Err(Failure::failed(format!("the volume that {snapshot} was taken of is gone"))
                    .hint(format!("`rimrock clone create {snapshot} NAME` makes a new one of it")));
            }
            (place(&taken, "volume"), place(&taken, "name"))
        }
    };
    let arguments = Arguments::new()
        .with("name", volume)
        .with("snapshot", snapshot)
        .maybe("keep", keep.keep)
        .flag("discard", keep.discard)
        .flag("foreign", keep.foreign);
    let answer = call(common, "volume_rollback", arguments)?;
    let kept = match answer["kept"].as_str() {
        Some(kept) => format!("what it held is kept as {kept}"),
        None => "what it held is gone".to_owned(),
    };
    let (name, snapshot) =
        (answer["name"].as_str().unwrap_or("?"), answer["snapshot"].as_str().unwrap_or("?"));
    print_done(common.output, &answer, &format!("{name} is what {snapshot} was; {kept}"))
}

/// The snapshot that is meant. Among the volume's own the name as given is looked for first, then one that ends in
/// it; any other of the pool is named in full.
fn snapshot_of(common: &Common, volume: &Value, given: &str) -> Result<String, Failure> {
    let arguments =
        Arguments::new().with("volume", place(volume, "name")).maybe("pool", volume["pool"].as_str());
    let own = call(common, "snapshot_list", arguments)?;
    let own = own.as_array().map_or(&[][..], Vec::as_slice);
    let names = |snapshot: &&Value| {
        let name = snapshot["name"].as_str().unwrap_or_default();
        name == given || place(snapshot, "name") == given || snapshot["uuid"].as_str() == Some(given)
    };
    if let Some(named) = own.iter().find(names) {
        return Ok(place(named, "name"));
    }
    let ending = format!("@{given}");
    let mut ended =
        own.iter().filter(|snapshot| snapshot["name"].as_str().unwrap_or_default().ends_with(&ending));
    match (ended.next(), ended.next()) {
        (None, _) => Ok(given.to_owned()),
        (Some(one), None) => Ok(place(one, "name")),
        (Some(one), Some(other)) => Err(Failure::failed(format!(
            "{given} may be {} or {}",
            one["name"].as_str().unwrap_or("?"),
            other["name"].as_str().unwrap_or("?")
        ))
        .hint("give the whole name")),
    }
}

/// A node named beyond doubt: `POOL/NAME`.
fn place(node: &Value, member: &str) -> String {
    format!("{}/{}", node["pool"].as_str().unwrap_or_default(), node[member].as_str().unwrap_or_default())
}
