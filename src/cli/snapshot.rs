//! `rimrock snapshot …`
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::diff::Diff;
use super::output::{Column, Show, print_done, print_list, print_object};
use super::rollback::{Keep, ROLLBACK_HELP, rollback};
use super::volume::{SHOW, split};
use super::{Common, Failure};
use clap::Subcommand;

/// Take snapshots, compare them, go back to them
#[derive(Debug, Subcommand)]
pub enum Snapshot {
    /// Take a snapshot of a volume
    #[command(after_help = "Instant, whatever the volume's size; hosts go on writing.

Example:
  rimrock snapshot create model@step-1000")]
    Create {
        /// VOLUME@SNAPSHOT or POOL/VOLUME@SNAPSHOT
        name: String,
    },
    /// List snapshots
    #[command(after_help = "Examples:\n  rimrock snapshot list\n  rimrock snapshot list model")]
    List {
        /// Only those of this volume, by name
        volume: Option<String>,
        /// Only of this pool
        #[arg(long)]
        pool: Option<String>,
    },
    /// Show one snapshot
    #[command(after_help = "Example:\n  rimrock snapshot show model@step-1000")]
    Show {
        /// NAME, POOL/NAME or UUID
        name: String,
    },
    /// Delete a snapshot; space that only it used comes back in the background
    #[command(after_help = "Example:\n  rimrock snapshot delete model@step-1000")]
    Delete {
        /// NAME, POOL/NAME or UUID
        name: String,
    },
    /// Make the volume what the snapshot was
    #[command(after_help = ROLLBACK_HELP)]
    Rollback {
        /// NAME, POOL/NAME or UUID
        name: String,
        #[command(flatten)]
        keep: Keep,
    },
    /// Show which ranges differ between two snapshots or volumes, or which hold data
    #[command(after_help = "Examples:
  rimrock snapshot diff model@step-1000 model@step-2000
  rimrock snapshot diff model@step-1000              all that holds data

KIND is `data` for what was written and `zero` for what was trimmed or zeroed since. A volume that
is written meanwhile differs in ways that depend on the moment; compare snapshots of it.")]
    Diff(Diff),
}

const LIST: &[Column] = &[
    ("NAME", "name", Show::Plain),
    ("POOL", "pool", Show::Plain),
    ("CREATED", "created", Show::Time),
    ("REFERENCED", "referenced", Show::Bytes),
    ("WRITTEN", "written", Show::Bytes),
    ("UNIQUE", "unique", Show::Bytes),
    ("PARENT", "parent", Show::Plain),
    ("CHILDREN", "children", Show::Plain),
];

impl Snapshot {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let format = common.output;
        match self {
            Snapshot::Create { name } => {
                let (pool, whole) = split(&name);
                let Some((volume, _)) = whole.rsplit_once('@') else {
                    return Err(Failure::usage(format!("{name:?} does not say of which volume"))
                        .hint("write VOLUME@SNAPSHOT, as in `rimrock snapshot create model@step-1000`"));
                };
                let arguments =
                    Arguments::new().maybe("pool", pool).with("volume", volume).with("name", whole);
                print_object(format, &call(common, "snapshot_create", arguments)?, SHOW)
            }
            Snapshot::List { volume, pool } => {
                let arguments = Arguments::new().maybe("volume", volume).maybe("pool", pool);
                print_list(format, &call(common, "snapshot_list", arguments)?, LIST)
            }
            Snapshot::Show { name } => print_object(
                format,
                &call(common, "snapshot_get", Arguments::new().with("name", name))?,
                SHOW,
            ),
            Snapshot::Delete { name } => {
                let answer = call(common, "snapshot_delete", Arguments::new().with("name", name.as_str()))?;
                print_done(format, &answer, &format!("snapshot {name} is deleted"))
            }
            Snapshot::Rollback { name, keep } => rollback(common, None, &name, keep),
            Snapshot::Diff(diff) => diff.run(common),
        }
    }
}
