//! `rimrock pool …`
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::output::{Column, Show, print_done, print_list, print_object};
use super::{Common, Failure, size};
use clap::Subcommand;
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
