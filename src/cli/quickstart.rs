//! `rimrock quickstart`: the whole appliance at work, on a file, in one command.
//!
//! The daemon runs here as it does under `rimrock serve`; the story runs beside it on a thread of its own and
//! reaches the daemon only as anybody could, over the control socket and over NVMe/TCP.
#![forbid(unsafe_code)]

mod checkpoint;
mod link;
mod made;
mod report;
mod story;

use super::daemon::{self, start_log, stop_signal};
use super::output::{Format, print};
use super::{Common, Failure, address, size};
use crate::config::{Config, parse_cores};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Show checkpoints, snapshots, a rollback and a clone at work, on files in this directory
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Writes a series of checkpoints in safetensors layout to a thin volume through NVMe/TCP, takes a
snapshot after each, lets the run go wrong, rolls back, and exports the last good checkpoint read-only.
Every byte is verified. Then it keeps serving until Ctrl-C. A second run goes on where the first ended;
of what earlier runs made it keeps the newest checkpoints, and what you made in the pool it leaves
alone. The control socket is DIR/rimrock.sock, or that of --socket, never RIMROCK_SOCKET.

Examples:
  rimrock quickstart
  rimrock quickstart --once --size 200MB
  rimrock quickstart --dir /data/try --listen 127.0.0.1:4421"
)]
pub struct Quickstart {
    /// Where the pool's file and the control socket are kept
    #[arg(long, value_name = "DIR", default_value = "./rimrock-data")]
    dir: PathBuf,
    /// Size of all checkpoints of this run together
    #[arg(long, value_parser = size, default_value = "1GB")]
    size: u64,
    /// Size of the pool's file, which is sparse
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "16GiB")]
    pool_size: u64,
    /// Where to listen for NVMe/TCP
    #[arg(long, value_name = "ADDR:PORT", value_parser = address, default_value = "127.0.0.1:4420")]
    listen: SocketAddr,
    /// Cores to poll on (default: all but one, at least one)
    #[arg(long, value_name = "LIST")]
    cores: Option<String>,
    /// End when the demonstration is over
    #[arg(long)]
    once: bool,
}

impl Quickstart {
    /// Runs the demonstration, then serves until a signal comes.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        // What goes wrong is told by the story; the daemon's log would only run through its progress bars.
        start_log("error")?;
        std::fs::create_dir_all(&self.dir).map_err(|error| {
            Failure::failed(format!("cannot create {}: {error}", self.dir.display()))
                .hint("choose another place with --dir")
        })?;
        // Devices are named by absolute paths; the socket keeps the short form, whose length is limited.
        let dir = std::path::absolute(&self.dir)
            .map_err(|error| Failure::failed(format!("cannot resolve {}: {error}", self.dir.display())))?;
        let mut config = Config::default();
        config.control.socket = common.socket.clone().unwrap_or_else(|| self.dir.join("rimrock.sock"));
        config.target.listen = self.listen;
        if let Some(cores) = &self.cores {
            config.reactor.cores = parse_cores(cores).map_err(Failure::usage)?;
        }
        let (format, once) = (common.output, self.once);
        let story = story::Story {
            socket: config.control.socket.clone(),
            dir,
            pool_bytes: self.pool_size,
            all_bytes: self.size,
            listen: self.listen,
            once,
            format,
        };
        daemon::run(
            &config,
            "a quickstart may be running already; --dir starts another one elsewhere",
            async {
                daemon::blocking(move || story.tell()).await?;
                if once {
                    return Ok(());
                }
                stop_signal().await;
                if format == Format::Table { print("\nstopping\n") } else { Ok(()) }
            },
        )
    }
}
