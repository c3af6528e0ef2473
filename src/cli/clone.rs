//! `rimrock clone …`
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::output::{print_done, print_list, print_object};
use super::volume::{LIST, SHOW};
use super::{Common, Failure};
use clap::Subcommand;
use serde_json::Value;

/// Make writable volumes out of snapshots
#[derive(Debug, Subcommand)]
pub enum Clone {
    /// Make a new volume that begins as the snapshot
    #[command(after_help = "Instant, and shares all space with the snapshot until it is written.

Example:
  rimrock clone create model@step-1000 finetune")]
    Create {
        /// The snapshot: NAME, POOL/NAME or UUID
        snapshot: String,
        /// The new volume
        name: String,
    },
    /// List volumes that began as a snapshot
    #[command(after_help = "Example:\n  rimrock clone list")]
    List {
        /// Only of this pool
        #[arg(long)]
        pool: Option<String>,
    },
    /// Show one clone
    #[command(after_help = "Example:\n  rimrock clone show finetune")]
    Show {
        /// NAME, POOL/NAME or UUID
        name: String,
    },
    /// Delete a clone
    #[command(after_help = "Example:\n  rimrock clone delete finetune")]
    Delete {
        /// NAME, POOL/NAME or UUID
        name: String,
    },
}

impl Clone {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let format = common.output;
        match self {
            Clone::Create { snapshot, name } => {
                let arguments = Arguments::new().with("snapshot", snapshot).with("name", name);
                print_object(format, &call(common, "clone_create", arguments)?, SHOW)
            }
            Clone::List { pool } => print_list(format, &Value::Array(clones(common, pool.as_deref())?), LIST),
            Clone::Show { name } => print_object(format, &clone(common, &name)?, SHOW),
            Clone::Delete { name } => {
                let uuid = clone(common, &name)?["uuid"].clone();
                let answer = call(common, "volume_delete", Arguments::new().with("name", uuid))?;
                print_done(format, &answer, &format!("clone {name} is deleted"))
            }
        }
    }
}

/// The clone called `name`; another volume is refused.
fn clone(common: &Common, name: &str) -> Result<Value, Failure> {
    let volume = call(common, "volume_get", Arguments::new().with("name", name))?;
    if clones(common, volume["pool"].as_str())?.iter().any(|clone| clone["uuid"] == volume["uuid"]) {
        return Ok(volume);
    }
    Err(Failure::failed(format!("{name} is a volume that did not begin as a snapshot"))
        .hint("`rimrock volume` looks after it; `rimrock clone list` shows the clones"))
}

/// The volumes that began as a snapshot of another.
fn clones(common: &Common, pool: Option<&str>) -> Result<Vec<Value>, Failure> {
    let all = |method| call(common, method, Arguments::new().maybe("pool", pool));
    let (volumes, snapshots) = (all("volume_list")?, all("snapshot_list")?);
    let (volumes, snapshots) = (list(&volumes), list(&snapshots));
    Ok(volumes.iter().filter(|volume| began_as_snapshot(volume, snapshots)).cloned().collect())
}

/// Whether a forebear was taken of another volume, or of one that is gone. Its own snapshots are forebears too.
fn began_as_snapshot(volume: &Value, snapshots: &[Value]) -> bool {
    let snapshot = |name: &Value| {
        snapshots.iter().find(|snapshot| snapshot["pool"] == volume["pool"] && snapshot["name"] == *name)
    };
    std::iter::successors(snapshot(&volume["parent"]), |forebear| snapshot(&forebear["parent"]))
        .any(|forebear| forebear["volume"] != volume["name"])
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[][..], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_volume_with_snapshots_of_its_own_is_no_clone() {
        let node = |name: &str, parent: &str, volume: &str| json!({ "pool": "main", "name": name, "parent": parent, "volume": volume });
        let mut snapshots = vec![node("model@1", "", "model"), node("model@2", "model@1", "model")];
        snapshots.push(node("tuned@1", "model@1", "tuned"));
        for (name, parent, cloned) in [
            ("model", "model@2", false),
            ("fresh", "", false),
            ("finetune", "model@1", true),
            ("tuned", "tuned@1", true),
        ] {
            assert_eq!(began_as_snapshot(&node(name, parent, ""), &snapshots), cloned, "{name}");
        }
    }
}
