//! `rimrock snapshot …`
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::diff::Diff;
use super::output::{Column, Show, print_done, print_list, print_object};
use super::rollback::{Keep, ROLLBACK_HELP, rollback};
use super::transfer::{SnapshotReceive, SnapshotSend};
use super::volume::{SHOW, split};
use super::{Common, Failure};
use clap::Subcommand;
use serde_json::json;

/// Take snapshots, compare them, go back to them, send them elsewhere
#[derive(Debug, Subcommand)]
pub enum Snapshot {
    /// Take a snapshot of a volume, or of several volumes in one instant
    #[command(
        after_help = "Instant, whatever the volume's size; hosts go on writing. Several volumes of one pool are
taken in the same instant.

Examples:
  rimrock snapshot create model@step-1000
  rimrock snapshot create rank0@step-1000 rank1@step-1000 rank2@step-1000"
    )]
    Create {
        /// VOLUME@SNAPSHOT or POOL/VOLUME@SNAPSHOT
        #[arg(required = true)]
        names: Vec<String>,
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
    /// Pin a snapshot or volume, so that it cannot be deleted
    #[command(
        after_help = "Any number of people or programs can pin the same; it stays until each has unpinned it.

Example:
  rimrock snapshot pin model@step-1000 --by serving --reason 'in production'"
    )]
    Pin {
        /// NAME, POOL/NAME or UUID
        name: String,
        /// Who pins it: a name
        #[arg(long)]
        by: String,
        /// Why, for whoever is refused
        #[arg(long)]
        reason: Option<String>,
    },
    /// Take a pin away
    #[command(after_help = "Example:\n  rimrock snapshot unpin model@step-1000 --by serving")]
    Unpin {
        /// NAME, POOL/NAME or UUID
        name: String,
        /// Who pinned it
        #[arg(long)]
        by: String,
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
    /// Write a snapshot, or what changed since another, to a file or into a pipe
    #[command(after_help = SEND_HELP)]
    Send(SnapshotSend),
    /// Make what another daemon sent a snapshot here
    #[command(after_help = RECEIVE_HELP)]
    Receive(SnapshotReceive),
}

const SEND_HELP: &str =
    "What is sent can be received by any Rimrock; docs/send-stream.md has the format. Neither
snapshot can be deleted meanwhile. With --file the file has its name only when it is whole.

Examples:
  rimrock snapshot send model@step-1000 --file step-1000.rimsend
  rimrock snapshot send --from model@step-1000 model@step-2000 --dry-run
  rimrock snapshot send model@step-1000 | ssh other rimrock snapshot receive

Exit codes: 0 all was sent; 1 refused or failed, or the reader closed the pipe early; 2 the command
line is wrong, or the stream would go to a terminal.";

const RECEIVE_HELP: &str =
    "The snapshot keeps its UUID and age. A difference needs the snapshot that it was sent from, under
any name. Everything is checked, written, flushed, read back and compared before the snapshot is
there; whatever goes wrong before that leaves nothing. `rimrock clone create` makes a volume of it.

Examples:
  rimrock snapshot receive --file step-1000.rimsend
  rimrock snapshot receive backup/model@step-1000 < step-1000.rimsend
  rimrock snapshot receive --check step-1000.rimsend

Exit codes: 0 the snapshot is there, or the stream is whole; 1 refused or failed, nothing was left;
2 the command line is wrong.";

const LIST: &[Column] = &[
    ("NAME", "name", Show::Plain),
    ("POOL", "pool", Show::Plain),
    ("VOLUME", "volume", Show::Plain),
    ("CREATED", "created", Show::Time),
    ("REFERENCED", "referenced", Show::Bytes),
    ("WRITTEN", "written", Show::Bytes),
    ("UNIQUE", "unique", Show::Bytes),
    ("PARENT", "parent", Show::Plain),
    ("CHILDREN", "children", Show::Plain),
    ("PINNED BY", "pinned_by", Show::Plain),
];

/// The pool, the volume and the whole name of a snapshot to be taken.
fn parts(name: &str) -> Result<(Option<&str>, &str, &str), Failure> {
    let (pool, whole) = split(name);
    match whole.rsplit_once('@') {
        Some((volume, _)) => Ok((pool, volume, whole)),
        None => Err(Failure::usage(format!("{name:?} does not say of which volume"))
            .hint("write VOLUME@SNAPSHOT, as in `rimrock snapshot create model@step-1000`")),
    }
}

impl Snapshot {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let format = common.output;
        match self {
            Snapshot::Create { names } => match names.as_slice() {
                [name] => {
                    let (pool, volume, whole) = parts(name)?;
                    let arguments =
                        Arguments::new().maybe("pool", pool).with("volume", volume).with("name", whole);
                    print_object(format, &call(common, "snapshot_create", arguments)?, SHOW)
                }
                names => {
                    let mut snapshots = Vec::new();
                    for name in names {
                        let (pool, volume, whole) = parts(name)?;
                        let volume = pool.map_or(volume.to_owned(), |pool| format!("{pool}/{volume}"));
                        snapshots.push(json!({ "volume": volume, "name": whole }));
                    }
                    let arguments = Arguments::new().with("snapshots", snapshots);
                    print_list(format, &call(common, "snapshot_create_group", arguments)?, LIST)
                }
            },
            Snapshot::Pin { name, by, reason } => {
                let arguments = Arguments::new().with("name", name).with("by", by).maybe("reason", reason);
                print_object(format, &call(common, "snapshot_pin", arguments)?, SHOW)
            }
            Snapshot::Unpin { name, by } => {
                let arguments = Arguments::new().with("name", name).with("by", by);
                print_object(format, &call(common, "snapshot_unpin", arguments)?, SHOW)
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
            Snapshot::Send(send) => send.run(common),
            Snapshot::Receive(receive) => receive.run(common),
        }
    }
}
