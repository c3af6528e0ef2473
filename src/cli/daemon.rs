//! A daemon in this process: its thread, its socket, its start and its end. `serve` is nothing else; `quickstart` and
//! `bench` do their work beside it and reach it only as anybody could.
#![forbid(unsafe_code)]

use super::Failure;
use crate::config::Config;
use crate::control::Daemon;
use crate::control::server::ControlSocket;
use std::io::IsTerminal;
use std::rc::Rc;

/// Runs a daemon for as long as `work` takes, and stops it cleanly however that ends. `elsewhere` tells how to get
/// another control socket, for when this one cannot be had.
pub fn run<T>(
    config: &Config,
    elsewhere: &str,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("cannot start the control thread: {error}")))?;
    let local = tokio::task::LocalSet::new();
    runtime.block_on(local.run_until(async {
        // The socket first: it is the lock against a second daemon, and clients that are early wait in its backlog.
        let socket = ControlSocket::bind(&config.control.socket)
            .map_err(|error| Failure::failed(error.to_string()).hint(elsewhere))?;
        let daemon = Daemon::start(config).await.map_err(|error| Failure::failed(error.to_string()))?;
        let daemon = Rc::new(daemon);
        tracing::info!(socket = %config.control.socket.display(), "ready");
        let ended = tokio::select! {
            () = socket.serve(daemon.clone()) => Err(Failure::failed("the control socket closed")),
            ended = work => ended,
        };
        tracing::info!("stopping");
        daemon.stop().await;
        tracing::info!("stopped");
        ended
    }))
}

/// Work that blocks, on a thread of its own; a signal interrupts it.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let working = tokio::task::spawn_blocking(work);
    tokio::select! {
        done = working => {
            done.unwrap_or_else(|_| Err(Failure::failed("the work ended in a panic; this is a fault of Rimrock")))
        }
        () = stop_signal() => Err(Failure::failed("interrupted; what was written is kept")),
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
