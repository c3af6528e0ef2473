//! `rimrock pool …`
#![forbid(unsafe_code)]

use super::check;
use super::client::{Arguments, call};
use super::output::{Column, Format, Show, print_done, print_list, print_object, utc};
use super::{Common, Failure, size};
use crate::units::format_size;
use clap::Subcommand;
use serde_json::Value;
use std::io::{BufRead, IsTerminal};

/// Create, import and look after pools
#[derive(Debug, Subcommand)]
pub enum Pool {
    /// Create a pool on one or more devices
    #[command(after_help = "Examples:
  rimrock pool create main 'uring:/var/lib/rimrock/disk0.img?size=64GiB'
  rimrock pool create fast disk0 disk1

Devices named without a URI were opened before, with `rimrock device create`.")]
    Create {
        /// The name of the new pool
        name: String,
        /// Devices by name, or by URI: ram:SIZE, uring:PATH, uring:PATH?size=SIZE
        #[arg(required = true)]
        devices: Vec<String>,
        /// Parts that work independently, each on one reactor; fixed for the pool's life
        #[arg(long)]
        shards: Option<u64>,
        /// Unit in which space is handed to shards
        #[arg(long, value_name = "SIZE", value_parser = size)]
        region: Option<u64>,
        /// Overwrite a pool that lies on the devices
        #[arg(long)]
        force: bool,
    },
    /// Bring a pool up from its devices, with everything exported from it
    #[command(after_help = "Example:\n  rimrock pool import uring:/var/lib/rimrock/disk0.img")]
    Import {
        /// Devices by name or URI, in any order
        #[arg(required = true)]
        devices: Vec<String>,
    },
    /// Take a pool down cleanly; its exports disappear until it is imported again
    #[command(after_help = "Example:\n  rimrock pool export main")]
    Export {
        /// The pool
        name: String,
        /// Disconnect the hosts that use it; refused without while there are any
        #[arg(long)]
        force: bool,
    },
    /// List pools
    #[command(after_help = "Example:\n  rimrock pool list -o json")]
    List,
    /// Show one pool
    #[command(after_help = "Example:\n  rimrock pool show main")]
    Show {
        /// The pool
        name: String,
    },
    /// Check a pool: every copy of all metadata, who owns each block, all counts, the catalog
    #[command(
        after_help = "A pool that is up is checked by its daemon, while it is in use. With --device the devices of a
pool that is not up are checked, without a daemon and without writing.
Exit code: 0 nothing is wrong, or all of it was repaired; 1 otherwise.

Examples:
  rimrock pool check main --data
  rimrock pool check --device uring:/var/lib/rimrock/disk0.img --repair --dry-run"
    )]
    Check {
        /// The pool
        #[arg(required_unless_present = "device")]
        name: Option<String>,
        /// A device of a pool that is not up; all of them are needed
        #[arg(long, value_name = "URI", conflicts_with = "name", num_args = 1..)]
        device: Vec<String>,
        /// Read every block of data too
        #[arg(long)]
        data: bool,
        /// Write again what can be derived: damaged copies, bitmaps, counts
        #[arg(long)]
        repair: bool,
        /// With --repair: only say what would be repaired
        #[arg(long, requires = "repair")]
        dry_run: bool,
    },
    /// List the damage that was come upon, and the volumes and blocks that have it
    #[command(after_help = "Example:\n  rimrock pool damage main")]
    Damage {
        /// The pool
        name: String,
        /// Forget what is listed; what is still damaged is found again
        #[arg(long)]
        clear: bool,
    },
    /// Read everything in a pool in the background, and heal what is damaged
    #[command(after_help = "Examples:
  rimrock pool scrub main --rate 200MiB
  rimrock pool scrub main --status")]
    Scrub {
        /// The pool
        name: String,
        /// Bytes a second at most
        #[arg(long, value_name = "SIZE", value_parser = size)]
        rate: Option<u64>,
        /// Begin at the beginning, also if it was stopped on the way
        #[arg(long)]
        anew: bool,
        /// Show how it stands
        #[arg(long, conflicts_with_all = ["stop", "rate", "anew"])]
        status: bool,
        /// Stop it where it is
        #[arg(long, conflicts_with_all = ["rate", "anew"])]
        stop: bool,
    },
    /// Destroy a pool and everything in it
    #[command(after_help = "Asks for the pool's name; a script gives it with --confirm.

Example:
  rimrock pool destroy main --confirm main")]
    Destroy {
        /// The pool
        name: String,
        /// The pool's name once more
        #[arg(long, value_name = "NAME")]
        confirm: Option<String>,
    },
}

const LIST: &[Column] = &[
    ("NAME", "name", Show::Plain),
    ("CAPACITY", "capacity", Show::Bytes),
    ("USED", "allocated", Show::Bytes),
    ("FREE", "free", Show::Bytes),
    ("HEALTH", "health", Show::Plain),
    ("SHARDS", "shards", Show::Plain),
    ("DEVICES", "devices", Show::Plain),
];

const SHOW: &[Column] = &[
    ("name", "name", Show::Plain),
    ("uuid", "uuid", Show::Plain),
    ("health", "health", Show::Plain),
    ("capacity", "capacity", Show::Bytes),
    ("used", "allocated", Show::Bytes),
    ("free", "free", Show::Bytes),
    ("metadata", "metadata", Show::Bytes),
    ("being freed", "pending_free", Show::Bytes),
    ("region", "region_bytes", Show::Bytes),
    ("shards", "shards", Show::Plain),
    ("volumes", "volumes", Show::Plain),
    ("snapshots", "snapshots", Show::Plain),
    ("devices", "devices", Show::Plain),
];

const SCRUB: &[Column] = &[
    ("state", "state", Show::Plain),
    ("rate", "rate", Show::Bytes),
    ("started", "started", Show::Time),
    ("to read", "bytes_total", Show::Bytes),
    ("read", "bytes_done", Show::Bytes),
    ("seconds to go", "eta_seconds", Show::Plain),
    ("errors", "errors", Show::Plain),
    ("healed", "healed", Show::Plain),
    ("last completed", "last_completed", Show::Plain),
];

impl Pool {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let format = common.output;
        match self {
            Pool::Create { name, devices, shards, region, force } => {
                let arguments = Arguments::new()
                    .with("name", name)
                    .with("devices", devices)
                    .maybe("shards", shards)
                    .maybe("region_bytes", region)
                    .flag("force", force);
                print_object(format, &call(common, "pool_create", arguments)?, SHOW)
            }
            Pool::Import { devices } => {
                let arguments = Arguments::new().with("devices", devices);
                print_object(format, &call(common, "pool_import", arguments)?, SHOW)
            }
            Pool::Export { name, force } => {
                let arguments = Arguments::new().with("name", name.as_str()).with("force", force);
                let answer = call(common, "pool_export", arguments)?;
                print_done(
                    format,
                    &answer,
                    &format!("pool {name} is down; `rimrock pool import` brings it back"),
                )
            }
            Pool::List => print_list(format, &call(common, "pool_list", Arguments::new())?, LIST),
            Pool::Show { name } => {
                print_object(format, &call(common, "pool_get", Arguments::new().with("name", name))?, SHOW)
            }
            Pool::Check { name, device, data, repair, dry_run } => {
                let repair = repair && !dry_run;
                let report = match name {
                    Some(name) => {
                        let arguments =
                            Arguments::new().with("name", name).flag("repair", repair).flag("data", data);
                        call(common, "pool_check", arguments)?
                    }
                    None => check::offline(&device, repair, data)?,
                };
                check::print_report(format, &report, dry_run)
            }
            Pool::Damage { name, clear: true } => {
                let answer = call(common, "pool_damage_clear", Arguments::new().with("name", name))?;
                print_done(format, &answer, "the damage found so far is forgotten")
            }
            Pool::Damage { name, clear: false } => {
                let list = call(common, "pool_damage_list", Arguments::new().with("name", name))?;
                check::print_damage(format, &list)
            }
            Pool::Scrub { name, rate, anew, status, stop } => {
                let (method, arguments) = match (status, stop) {
                    (true, _) => ("pool_get_scrub", Arguments::new()),
                    (_, true) => ("pool_scrub_stop", Arguments::new()),
                    _ => ("pool_scrub_start", Arguments::new().maybe("rate", rate).flag("anew", anew)),
                };
                let mut status = call(common, method, arguments.with("name", name))?;
                if format == Format::Table {
                    tell_last_scrub(&mut status);
                }
                print_object(format, &status, SCRUB)
            }
            Pool::Destroy { name, confirm } => {
                let confirm = match confirm {
                    Some(confirm) => confirm,
                    None => ask(&name)?,
                };
                let arguments = Arguments::new().with("name", name.as_str()).with("confirm", confirm);
                let answer = call(common, "pool_destroy", arguments)?;
                print_done(format, &answer, &format!("pool {name} is destroyed"))
            }
        }
    }
}

/// Makes a sentence of the scrub that ended last; of one that does not run there is nothing else to tell.
fn tell_last_scrub(status: &mut Value) {
    let last = status["last_completed"].take();
    if last.is_object() {
        let number = |name: &str| last[name].as_u64().unwrap_or(0);
        status["last_completed"] = Value::from(format!(
            "{}, {} in {} s, {} errors, {} healed",
            utc(number("at")),
            format_size(number("bytes")),
            number("seconds"),
            number("errors"),
            number("healed")
        ));
    }
    if status["state"] == "idle" {
        for name in ["rate", "bytes_total", "bytes_done", "errors", "healed"] {
            status[name].take();
        }
    }
}

/// Asks at the terminal for the name of what is about to be destroyed.
fn ask(name: &str) -> Result<String, Failure> {
    if !std::io::stdin().is_terminal() {
        return Err(Failure::usage("destroying a pool needs its name once more")
            .hint(format!("add --confirm {name}")));
    }
    eprint!("This destroys the pool and everything in it. Type its name to go on: ");
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line) {
        Ok(_) => Ok(line.trim().to_owned()),
        Err(error) => Err(Failure::failed(format!("cannot read the answer: {error}"))),
    }
}
