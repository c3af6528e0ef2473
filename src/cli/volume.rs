//! `rimrock volume …`
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::diff::Diff;
use super::output::{Column, Format, Show, print, print_done, print_json, print_list, print_object};
use super::rollback::{Keep, ROLLBACK_HELP, rollback};
use super::{Common, Failure, address, size};
use crate::units::format_size;
use clap::Subcommand;
use serde_json::Value;
use std::net::SocketAddr;

/// Create, export and look after volumes
#[derive(Debug, Subcommand)]
pub enum Volume {
    /// Create a thin volume
    #[command(after_help = "Examples:
  rimrock volume create model 20GiB
  rimrock volume create main/scratch 512G --block-size 512

Where there are several pools, say POOL/NAME. G and GiB are 2^30 bytes, GB is 10^9; so for K, M, T
and P. A volume is a whole number of MiB; what is between is rounded up.")]
    Create {
        /// The new volume: NAME or POOL/NAME
        name: String,
        /// Its size, such as 20GiB; space is used only as it is written
        #[arg(value_parser = size)]
        size: u64,
        /// Block size that hosts see
        #[arg(long, value_parser = ["512", "4096"], default_value = "4096")]
        block_size: String,
        /// Acknowledge a write only when it is on stable media
        #[arg(long)]
        no_write_cache: bool,
        /// Use this UUID
        #[arg(long)]
        uuid: Option<String>,
    },
    /// List volumes, clones included
    #[command(after_help = "Examples:\n  rimrock volume list\n  rimrock volume list --pool main -o json")]
    List {
        /// Only of this pool
        #[arg(long)]
        pool: Option<String>,
    },
    /// Show one volume
    #[command(after_help = "Example:\n  rimrock volume show model")]
    Show {
        /// NAME, POOL/NAME or UUID
        name: String,
    },
    /// Delete a volume; its space comes back in the background
    #[command(after_help = "An exported volume is refused: unexport it first.

Example:
  rimrock volume delete scratch")]
    Delete {
        /// NAME, POOL/NAME or UUID
        name: String,
    },
    /// Give a volume another size
    #[command(
        after_help = "Hosts that are connected see the new size at once. A smaller size loses what lies
beyond it, so it needs --allow-shrink; make the file system smaller before.

Examples:
  rimrock volume resize model 40GiB
  rimrock volume resize model 10GiB --allow-shrink"
    )]
    Resize {
        /// NAME, POOL/NAME or UUID
        name: String,
        /// The new size
        #[arg(value_parser = size)]
        size: u64,
        /// Let the end of the volume be lost
        #[arg(long)]
        allow_shrink: bool,
    },
    /// Give a volume another name
    #[command(after_help = "Example:\n  rimrock volume rename model model-v1")]
    Rename {
        /// NAME, POOL/NAME or UUID
        name: String,
        /// The new name
        new_name: String,
    },
    /// Make a volume what a snapshot of it was
    #[command(after_help = ROLLBACK_HELP)]
    Rollback {
        /// NAME, POOL/NAME or UUID
        name: String,
        /// The snapshot by its name or UUID; of the volume's own, the part after the @ is enough
        snapshot: String,
        #[command(flatten)]
        keep: Keep,
    },
    /// Make a clone the main line, and the volume it was made from the clone
    #[command(
        after_help = "The snapshots that both share from then on belong to the promoted volume. No data is copied,
and hosts notice nothing.

Example:
  rimrock volume promote finetune"
    )]
    Promote {
        /// The clone: NAME, POOL/NAME or UUID
        name: String,
    },
    /// Show which ranges differ between two volumes or snapshots, or which hold data
    #[command(after_help = "Example:\n  rimrock volume diff model@step-1000 model")]
    Diff(Diff),
    /// Make a volume, or a snapshot (read-only), available over NVMe/TCP
    #[command(after_help = "Creates the subsystem, the namespace and the listener in one step and prints the
line that connects a Linux host. Exports are kept in the pool: they come back whenever it is
imported, which a [[pool]] entry in the daemon's configuration does at every start.

Examples:
  rimrock volume export model
  rimrock volume export model@step-1000 --listen 10.0.0.5:4420
  rimrock volume export model --host nqn.2014-08.org.example:host1")]
    Export {
        /// NAME, POOL/NAME or UUID
        name: String,
        /// Where to listen (default: `target.listen` of the configuration, 0.0.0.0:4420 without one)
        #[arg(long, value_name = "ADDR:PORT", value_parser = address)]
        listen: Option<SocketAddr>,
        /// NQN of the subsystem (default: derived from the pool's and the volume's name)
        #[arg(long)]
        nqn: Option<String>,
        /// NQN of a host that may connect; may be repeated (default: any host)
        #[arg(long = "host", value_name = "NQN")]
        hosts: Vec<String>,
        /// Refuse writes. A snapshot is always read-only; this is for a volume, such as a clone that is served
        #[arg(long)]
        read_only: bool,
    },
    /// End an export; hosts that are connected lose the volume
    #[command(after_help = "Example:\n  rimrock volume unexport model")]
    Unexport {
        /// NAME, POOL/NAME or UUID
        name: String,
    },
}

/// Columns of a list of volumes.
pub const LIST: &[Column] = &[
    ("NAME", "name", Show::Plain),
    ("POOL", "pool", Show::Plain),
    ("SIZE", "size", Show::Bytes),
    ("REFERENCED", "referenced", Show::Bytes),
    ("WRITTEN", "written", Show::Bytes),
    ("UNIQUE", "unique", Show::Bytes),
    ("PARENT", "parent", Show::Plain),
    ("PINNED BY", "pinned_by", Show::Plain),
    ("EXPORTED AS", "exports", Show::Plain),
];

/// Lines of one volume or snapshot.
pub const SHOW: &[Column] = &[
    ("name", "name", Show::Plain),
    ("pool", "pool", Show::Plain),
    ("kind", "kind", Show::Plain),
    ("uuid", "uuid", Show::Plain),
    ("size", "size", Show::Bytes),
    ("block size", "block_size", Show::Plain),
    ("write cache", "write_cache", Show::Plain),
    ("read-only", "read_only", Show::Plain),
    ("referenced", "referenced", Show::Bytes),
    ("written since parent", "written", Show::Bytes),
    ("unique", "unique", Show::Bytes),
    ("parent", "parent", Show::Plain),
    ("children", "children", Show::Plain),
    ("created", "created", Show::Time),
    ("pinned by", "pinned_by", Show::Plain),
    ("exported as", "exports", Show::Plain),
];

impl Volume {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let format = common.output;
        match self {
            Volume::Create { name, size, block_size, no_write_cache, uuid } => {
                let (pool, name) = split(&name);
                let arguments = Arguments::new()
                    .maybe("pool", pool)
                    .with("name", name)
                    .with("size", size)
                    .with("block_size", block_size.parse::<u64>().unwrap_or(4096))
                    .with("write_cache", !no_write_cache)
                    .maybe("uuid", uuid);
                print_sized(format, size, &call(common, "volume_create", arguments)?)
            }
            Volume::List { pool } => {
                print_list(format, &call(common, "volume_list", Arguments::new().maybe("pool", pool))?, LIST)
            }
            Volume::Show { name } => {
                print_object(format, &call(common, "volume_get", Arguments::new().with("name", name))?, SHOW)
            }
            Volume::Delete { name } => {
                let answer = call(common, "volume_delete", Arguments::new().with("name", name.as_str()))?;
                print_done(format, &answer, &format!("volume {name} is deleted"))
            }
            Volume::Resize { name, size, allow_shrink } => {
                let arguments = Arguments::new()
                    .with("name", name.as_str())
                    .with("size", size)
                    .flag("allow_shrink", allow_shrink);
                let answer = call(common, "volume_resize", arguments).map_err(|failure| {
                    match !allow_shrink && is_larger(common, &name, size) {
                        true => {
                            failure.or_hint("--allow-shrink allows it; what lies beyond the new end is lost")
                        }
                        false => failure,
                    }
                })?;
                print_sized(format, size, &answer)
            }
            Volume::Rename { name, new_name } => {
                let arguments = Arguments::new().with("name", name).with("new_name", new_name);
                print_object(format, &call(common, "volume_rename", arguments)?, SHOW)
            }
            Volume::Rollback { name, snapshot, keep } => rollback(common, Some(&name), &snapshot, keep),
            Volume::Promote { name } => print_object(
                format,
                &call(common, "volume_promote", Arguments::new().with("name", name))?,
                SHOW,
            ),
            Volume::Diff(diff) => diff.run(common),
            Volume::Export { name, listen, nqn, hosts, read_only } => {
                let arguments = Arguments::new()
                    .with("name", name)
                    .maybe("listen", listen.map(|listen| listen.to_string()))
                    .maybe("nqn", nqn)
                    .maybe("hosts", (!hosts.is_empty()).then_some(hosts))
                    .flag("read_only", read_only);
                print_export(format, &call(common, "volume_export", arguments)?)
            }
            Volume::Unexport { name } => {
                let answer = call(common, "volume_unexport", Arguments::new().with("name", name.as_str()))?;
                print_done(format, &answer, &format!("{name} is no longer exported"))
            }
        }
    }
}

/// `POOL/NAME` in its parts.
pub fn split(name: &str) -> (Option<&str>, &str) {
    match name.split_once('/') {
        Some((pool, name)) => (Some(pool), name),
        None => (None, name),
    }
}

/// Whether a volume is larger than `size`.
fn is_larger(common: &Common, name: &str, size: u64) -> bool {
    let volume = call(common, "volume_get", Arguments::new().with("name", name));
    volume.is_ok_and(|volume| volume["size"].as_u64().is_some_and(|current| current > size))
}

/// Prints a volume that was given a size, and says where it got another.
fn print_sized(format: Format, asked: u64, answer: &Value) -> Result<(), Failure> {
    print_object(format, answer, SHOW)?;
    match answer["size"].as_u64() {
        Some(size) if size != asked && format == Format::Table => print(&format!(
            "The size is {}, not {}: a volume is a whole number of MiB.\n",
            format_size(size),
            format_size(asked)
        )),
        _ => Ok(()),
    }
}

fn print_export(format: Format, answer: &Value) -> Result<(), Failure> {
    if format == Format::Json {
        return print_json(answer);
    }
    let mut text = format!(
        "{} is namespace {} of {}\n",
        answer["name"].as_str().unwrap_or("?"),
        answer["nsid"],
        answer["nqn"].as_str().unwrap_or("?"),
    );
    text.push_str("On the host:\n");
    for line in answer["connect"].as_array().map_or(&[][..], Vec::as_slice) {
        text.push_str(&format!("  {}\n", line.as_str().unwrap_or("?")));
    }
    print(&text)
}
