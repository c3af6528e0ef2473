//! `rimrock snapshot …` and `rimrock clone …`
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::output::{Column, Show, print_done, print_list, print_object};
use super::volume::{self, Keep, ROLLBACK_HELP, SHOW, split};
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
        /// VOLUME@SNAPSHOT
        name: String,
        #[command(flatten)]
        keep: Keep,
    },
    /// Show which ranges differ between two snapshots or volumes
    #[command(after_help = "Example:\n  rimrock snapshot diff model@step-1000 model@step-2000")]
    Diff {
        /// The older
        from: String,
        /// The newer
        to: String,
    },
}

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
    /// List volumes that share space with a snapshot
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
                print_object(format, &call(common, "snapshot_create", arguments)?, SHOW);
            }
            Snapshot::List { volume, pool } => {
                let arguments = Arguments::new().maybe("volume", volume).maybe("pool", pool);
                print_list(format, &call(common, "snapshot_list", arguments)?, LIST);
            }
            Snapshot::Show { name } => {
                print_object(
                    format,
                    &call(common, "snapshot_get", Arguments::new().with("name", name))?,
                    SHOW,
                );
            }
            Snapshot::Delete { name } => {
                let answer = call(common, "snapshot_delete", Arguments::new().with("name", name.as_str()))?;
                print_done(format, &answer, &format!("snapshot {name} is deleted"));
            }
            Snapshot::Rollback { name, keep } => volume::rollback(common, None, &name, keep)?,
            Snapshot::Diff { from, to } => volume::diff(common, &from, &to)?,
        }
        Ok(())
    }
}

impl Clone {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let format = common.output;
        match self {
            Clone::Create { snapshot, name } => {
                let arguments = Arguments::new().with("snapshot", snapshot).with("name", name);
                print_object(format, &call(common, "clone_create", arguments)?, SHOW);
            }
            Clone::List { pool } => {
                let arguments = Arguments::new().maybe("pool", pool).with("clones", true);
                print_list(format, &call(common, "volume_list", arguments)?, volume::LIST);
            }
            Clone::Show { name } => {
                print_object(format, &call(common, "volume_get", Arguments::new().with("name", name))?, SHOW);
            }
            Clone::Delete { name } => {
                let answer = call(common, "volume_delete", Arguments::new().with("name", name.as_str()))?;
                print_done(format, &answer, &format!("clone {name} is deleted"));
            }
        }
        Ok(())
    }
}
