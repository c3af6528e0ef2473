//! `rimrock quickstart`: the whole appliance at work, on a file, in one command.
//!
//! The daemon runs here as it does under `rimrock serve`; the story runs beside it on a thread of its own and
//! reaches the daemon only as anybody could, over the control socket and over NVMe/TCP.
#![forbid(unsafe_code)]

mod checkpoint;
mod link;
mod story;

use super::output::print;
use super::serve::{start_log, stop_signal};
use super::{Common, Failure, size};
use crate::config::{Config, parse_cores};
use crate::control::Daemon;
use crate::control::server::ControlSocket;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;

/// Show checkpoints, snapshots, a rollback and a clone at work, on files in this directory
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Writes a series of checkpoints in safetensors layout to a thin volume through NVMe/TCP, takes a
snapshot after each, lets the run go wrong, rolls back, and exports the last good checkpoint read-only.
Every byte is verified. Then it keeps serving until Ctrl-C. A second run goes on where the first ended.

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
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:4420")]
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
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Failure::failed(format!("cannot start the control thread: {error}")))?;
        let local = tokio::task::LocalSet::new();
        runtime.block_on(local.run_until(self.perform(config, dir)))
    }

    async fn perform(self, config: Config, dir: PathBuf) -> Result<(), Failure> {
        let socket = ControlSocket::bind(&config.control.socket).map_err(|error| {
            Failure::failed(error.to_string())
                .hint("a quickstart may be running already; --dir starts another one elsewhere")
        })?;
        let daemon = Daemon::start(&config).await.map_err(|error| Failure::failed(error.to_string()))?;
        let daemon = Rc::new(daemon);
        let story = story::Story {
            socket: config.control.socket.clone(),
            dir,
            pool_bytes: self.pool_size,
            all_bytes: self.size,
            listen: self.listen,
            once: self.once,
        };
        let telling = tokio::task::spawn_blocking(move || story.tell());
        let serving = socket.serve(daemon.clone());
        let once = self.once;
        let live = async {
            match telling.await {
                Ok(Ok(())) if once => Ok(()),
                Ok(Ok(())) => {
                    stop_signal().await;
                    print("\nstopping\n");
                    Ok(())
                }
                Ok(Err(failure)) => Err(failure),
                Err(_) => {
                    Err(Failure::failed("the demonstration ended in a panic; this is a fault of Rimrock"))
                }
            }
        };
        let ended = tokio::select! {
            () = serving => Ok(()),
            ended = live => ended,
            () = stop_signal() => Err(Failure::failed("interrupted; the pool keeps what was written")),
        };
        daemon.stop().await;
        ended
    }
}
