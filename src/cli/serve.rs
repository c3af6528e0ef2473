//! `rimrock serve`: the daemon.
#![forbid(unsafe_code)]

use super::{Common, Failure};
use crate::config::{self, Config};
use crate::control::Daemon;
use crate::control::server::ControlSocket;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::rc::Rc;

/// Run the daemon in the foreground
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Without a configuration file the daemon starts with nothing configured, and everything is
done with the other commands. SIGTERM and Ctrl-C end it cleanly.

Examples:
  rimrock serve
  rimrock serve --config /etc/rimrock/rimrock.toml
  rimrock serve --socket /tmp/rimrock.sock --cores 0,2-3"
)]
pub struct Serve {
    /// Configuration file (config/rimrock.toml documents every key)
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Cores to poll on, such as 1 or 0,2-3 (default: all but one, at least one)
    #[arg(long, value_name = "LIST", value_parser = CoreList::parse)]
    cores: Option<CoreList>,
}

#[derive(Debug, Clone)]
struct CoreList(Vec<usize>);

impl CoreList {
    fn parse(text: &str) -> Result<CoreList, String> {
        config::parse_cores(text).map(CoreList)
    }
}

impl Serve {
    /// Runs until a signal ends it.
    pub fn run(self, common: &Common) -> Result<(), Failure> {
        let mut config = match &self.config {
            Some(path) => config::load(path).map_err(|error| {
                Failure::failed(error.to_string())
                    .hint("config/rimrock.toml in the source documents every key")
            })?,
            None => Config::default(),
        };
        if let Some(socket) = &common.socket {
            config.control.socket = socket.clone();
        }
        if let Some(cores) = self.cores {
            config.reactor.cores = cores.0;
        }
        start_log(&config.log.level)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Failure::failed(format!("cannot start the control thread: {error}")))?;
        let local = tokio::task::LocalSet::new();
        runtime.block_on(local.run_until(serve(config)))
    }
}

/// Logs go to standard error, so that standard output stays for answers.
pub fn start_log(level: &str) -> Result<(), Failure> {
    let filter = tracing_subscriber::EnvFilter::try_new(level)
        .map_err(|error| Failure::failed(format!("log level {level:?} is not understood: {error}")))?;
    // A second start within one process (tests) keeps the first subscriber.
    let colours = std::io::stderr().is_terminal();
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    let _ = log.try_init();
    Ok(())
}

async fn serve(config: Config) -> Result<(), Failure> {
    // The socket first: it is the lock against a second daemon, and clients that are early wait in its backlog.
    let socket =
        ControlSocket::bind(&config.control.socket).map_err(|error| Failure::failed(error.to_string()))?;
    let daemon = Daemon::start(&config).await.map_err(|error| Failure::failed(error.to_string()))?;
    let daemon = Rc::new(daemon);
    tracing::info!(socket = %config.control.socket.display(), "ready");
    tokio::select! {
        () = socket.serve(daemon.clone()) => {}
        () = stop_signal() => tracing::info!("stopping"),
    }
    daemon.stop().await;
    tracing::info!("stopped");
    Ok(())
}

/// Resolves at SIGTERM or SIGINT.
pub async fn stop_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut terminate), Ok(mut interrupt)) => {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
        }
        // Without handlers the signals end the process in their own way.
        _ => std::future::pending().await,
    }
}
