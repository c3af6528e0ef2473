//! `rimrock device …`
#![forbid(unsafe_code)]

use super::client::{Arguments, call};
use super::output::{Column, Show, print_done, print_list, print_object};
use super::{Common, Failure};
use clap::Subcommand;

/// Open and list devices
#[derive(Debug, Subcommand)]
pub enum Device {
    /// Open a device and give it a name
    #[command(after_help = "URIs:
  ram:SIZE[?block_size=512][&populate=yes]
      memory, lost at the end; populate takes it at once, not as it is written
  uring:PATH[?size=SIZE][&block_size=512]
      a file (created, sparse, when missing and size is given), or a block device

Quote a URI with ? or &, which shells take for their own. G and GiB are 2^30 bytes, GB is 10^9.

Examples:
  rimrock device create disk0 'uring:/var/lib/rimrock/disk0.img?size=64GiB'
  rimrock device create scratch ram:1GiB")]
    Create {
        /// What pools and subsystems will call it
        name: String,
        /// What it is
        uri: String,
    },
    /// List open devices
    #[command(after_help = "Example:\n  rimrock device list")]
    List,
    /// Show one device
    #[command(after_help = "Example:\n  rimrock device show disk0")]
    Show {
        /// The device
        name: String,
    },
    /// Close a device that nothing uses
    #[command(after_help = "Example:\n  rimrock device delete scratch")]
    Delete {
        /// The device
        name: String,
    },
}

const COLUMNS: &[Column] = &[
    ("NAME", "name", Show::Plain),
    ("SIZE", "size", Show::Bytes),
    ("BLOCK", "block_size", Show::Plain),
    ("USED BY", "used_by", Show::Plain),
    ("URI", "uri", Show::Plain),
];

const SHOW: &[Column] = &[
    ("name", "name", Show::Plain),
    ("uri", "uri", Show::Plain),
    ("kind", "kind", Show::Plain),
    ("uuid", "uuid", Show::Plain),
    ("size", "size", Show::Bytes),
    ("block size", "block_size", Show::Plain),
    ("write cache", "write_cache", Show::Plain),
    ("used by", "used_by", Show::Plain),
];

impl Device {
    /// Runs the command.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let format = common.output;
        match self {
            Device::Create { name, uri } => {
                let arguments = Arguments::new().with("name", name).with("uri", uri);
                print_object(format, &call(common, "device_create", arguments)?, SHOW)
            }
            Device::List => print_list(format, &call(common, "device_list", Arguments::new())?, COLUMNS),
            Device::Show { name } => {
                print_object(format, &call(common, "device_get", Arguments::new().with("name", name))?, SHOW)
            }
            Device::Delete { name } => {
                let answer = call(common, "device_delete", Arguments::new().with("name", name.as_str()))?;
                print_done(format, &answer, &format!("device {name} is closed"))
            }
        }
    }
}
