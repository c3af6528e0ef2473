//! The Unix socket: one task per connection, calls of a connection answered in their order.
//!
//! Order within a connection is a promise (a client may pipeline "create the pool, create a volume in it"), so
//! a slow call holds up only the connection it came over. Every answer is flushed before the connection is
//! closed: a client that shuts down its sending side right after asking still gets its full reply.
//!
//! The socket file is mode 0600 and guarded by a lock file beside it: of two daemons started on one path the
//! second is refused, and a file left behind by a killed daemon is replaced.
#![forbid(unsafe_code)]

use super::error::{METHOD_NOT_FOUND, RpcError};
use super::framing::{Frame, Framer};
use super::jsonrpc::{self, Id, Message, Rejected, Request};
use super::{Daemon, schema, table};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{Mode, umask};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};

/// Connections served at once; one more is told so and closed.
const CONNECTIONS_MAX: usize = 256;
/// Bytes taken from a connection at a time.
const READ_BYTES: usize = 64 << 10;
/// How long the rest of a refused request is read and dropped, so that its sender sees the answer and not a reset.
const DRAIN_TIME: Duration = Duration::from_secs(10);
/// The most bytes of a batch's answer before the rest of the batch is refused.
const BATCH_ANSWER_MAX: usize = 32 << 20;
/// How often it is looked whether the peer of a call that only reads is still there.
const PEER_POLL: Duration = Duration::from_millis(200);
/// The longest path of a Unix socket (`sun_path` less its terminating zero).
const SOCKET_PATH_MAX: usize = 107;

/// Why the socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Longer than the kernel takes.
    #[error("socket path {} is {} bytes long, Linux takes at most {SOCKET_PATH_MAX}; choose a shorter one with --socket", .0.display(), .0.as_os_str().len())]
    PathTooLong(PathBuf),
    /// Another daemon holds the lock or answers.
    #[error("another Rimrock already answers at {}; stop it, or choose another path with --socket", .0.display())]
    InUse(PathBuf),
    /// Something that is not a socket lies at the path.
    #[error("{} exists and is not a socket; it is left alone, choose another path with --socket", .0.display())]
    NotASocket(PathBuf),
    /// A file operation failed.
    #[error("cannot {step} {}: {source}; choose another path with --socket, or start as a user who may write there", path.display())]
    Io {
        /// What was tried.
        step: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// The bound socket. Dropping it removes its files.
pub struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
    lock_path: PathBuf,
    _lock: Flock<File>,
}

impl ControlSocket {
    /// Binds `path`. Must be called before other threads create files: the file mode is set through the umask.
    pub fn bind(path: &Path) -> Result<ControlSocket, SocketError> {
        if path.as_os_str().len() > SOCKET_PATH_MAX {
            return Err(SocketError::PathTooLong(path.to_owned()));
        }
        let failed = |step, path: &Path| {
            let path = path.to_owned();
            move |source| SocketError::Io { step, path, source }
        };
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).map_err(failed("create directory", parent))?;
        }
        let mut lock_name = path.as_os_str().to_owned();
        lock_name.push(".lock");
        let lock_path = PathBuf::from(lock_name);
        let file = open_lock(&lock_path).map_err(failed("open lock file", &lock_path))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, _)| SocketError::InUse(path.to_owned()))?;
        remove_stale(path)?;
        let before = umask(Mode::from_bits_truncate(0o177));
        let bound = UnixListener::bind(path);
        umask(before);
        let listener = bound.map_err(failed("listen on", path))?;
        Ok(ControlSocket { listener, path: path.to_owned(), lock_path, _lock: lock })
    }

    /// Serves until the future is dropped. Must run inside a `LocalSet`.
    pub async fn serve(&self, daemon: Rc<Daemon>) {
        tokio::join!(
            self.accept(&daemon),
            daemon.keep_listening(),
            daemon.keep_advertising(),
            daemon.look_after_transfers()
        );
    }

    async fn accept(&self, daemon: &Rc<Daemon>) {
        let connections = Rc::new(());
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) if Rc::strong_count(&connections) > CONNECTIONS_MAX => {
                    tokio::task::spawn_local(refuse_crowd(stream));
                }
                Ok((stream, _)) => {
                    let (daemon, held) = (daemon.clone(), connections.clone());
                    tokio::task::spawn_local(async move {
                        if let Err(error) = converse(stream, daemon).await {
                            tracing::debug!(%error, "control connection ended early");
                        }
                        drop(held);
                    });
                }
                // Out of descriptors: wait for connections to end instead of spinning.
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a control connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // The lock is still held here, so the files are ours to remove.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(&self.lock_path);
    }
}

/// Opens the lock file, or makes it. Whatever else lies at its path is neither followed nor emptied.
fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != nix::unistd::geteuid().as_raw() {
        return Err(io::Error::other("it is not a file of this user's"));
    }
    Ok(file)
}

/// Removes a socket nobody answers on.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(found) if !found.file_type().is_socket() => return Err(SocketError::NotASocket(path.to_owned())),
        Ok(_) => {}
    }
    // The lock says that no daemon of ours is there, but another program may be listening.
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(SocketError::InUse(path.to_owned()));
    }
    std::fs::remove_file(path).map_err(|source| SocketError::Io {
        step: "remove the stale socket",
        path: path.to_owned(),
        source,
    })
}

async fn refuse_crowd(mut stream: UnixStream) {
    let error = RpcError::refused(
        libc::EAGAIN,
        format!("{CONNECTIONS_MAX} control connections are open; close one and try again"),
    );
    let mut out = String::new();
    jsonrpc::write_answer(&mut out, &Id::null(), &Err(error));
    out.push('\n');
    let _ = stream.write_all(out.as_bytes()).await;
}

/// Serves one connection to its end.
async fn converse(mut stream: UnixStream, daemon: Rc<Daemon>) -> io::Result<()> {
    let mut framer = Framer::default();
    let mut chunk = vec![0; READ_BYTES];
    loop {
        let count = stream.read(&mut chunk).await?;
        framer.push(&chunk[..count]);
        let ended = count == 0;
        while let Some(frame) = framer.next_frame().or_else(|| if ended { framer.finish() } else { None }) {
            let message = match frame {
                Frame::Text(text) => jsonrpc::read_message(&text),
                Frame::Broken(error) => Message::Broken(jsonrpc::frame_error(error)),
            };
            let (answer, go_on) = respond(&daemon, &stream, message).await;
            stream.write_all(answer.as_bytes()).await?;
            if !go_on {
                return drain(stream, &mut chunk).await;
            }
        }
        if ended {
            return stream.shutdown().await;
        }
    }
}

/// Ends a connection whose peer may still be sending, without losing the answer just written.
async fn drain(mut stream: UnixStream, chunk: &mut [u8]) -> io::Result<()> {
    stream.shutdown().await?;
    let rest = async {
        while stream.read(chunk).await? > 0 {}
        Ok(())
    };
    tokio::time::timeout(DRAIN_TIME, rest).await.unwrap_or(Ok(()))
}

/// The bytes to answer (none for notifications), and whether the connection goes on.
async fn respond(daemon: &Rc<Daemon>, peer: &UnixStream, message: Message) -> (String, bool) {
    let mut out = String::new();
    match message {
        Message::Broken(Rejected { id, error }) => {
            jsonrpc::write_answer(&mut out, &id, &Err(error));
            out.push('\n');
            return (out, false);
        }
        Message::Single(request) => {
            if let Some((id, answer)) = run(daemon, peer, request).await {
                jsonrpc::write_answer(&mut out, &id, &answer);
                out.push('\n');
            }
        }
        Message::Batch(requests) => {
            for request in requests {
                let answered = match out.len() {
                    ..BATCH_ANSWER_MAX => run(daemon, peer, request).await,
                    _ => too_much(request),
                };
                if let Some((id, answer)) = answered {
                    out.push(if out.is_empty() { '[' } else { ',' });
                    jsonrpc::write_answer(&mut out, &id, &answer);
                }
            }
            if !out.is_empty() {
                out.push_str("]\n");
            }
        }
    }
    (out, true)
}

/// What is answered for a call of a batch whose answer is too long already; it is not made.
fn too_much(request: Result<Request, Rejected>) -> Option<(Id, Result<Value, RpcError>)> {
    let id = match request {
        Ok(request) => request.id?,
        Err(rejected) => rejected.id,
    };
    let text = format!("the answers of the calls before this one are longer than {BATCH_ANSWER_MAX} bytes");
    Some((
        id,
        Err(RpcError::refused(libc::E2BIG, text).hint("this call was not made; send fewer in a batch")),
    ))
}

async fn run(
    daemon: &Rc<Daemon>,
    peer: &UnixStream,
    request: Result<Request, Rejected>,
) -> Option<(Id, Result<Value, RpcError>)> {
    let request = match request {
        Ok(request) => request,
        Err(rejected) => return Some((rejected.id, Err(rejected.error))),
    };
    let answer = call(daemon, peer, &request).await;
    if let Err(error) = &answer {
        tracing::debug!(method = request.method, code = error.code, error.message, "call refused");
    }
    request.id.map(|id| (id, answer))
}

async fn call(daemon: &Rc<Daemon>, peer: &UnixStream, request: &Request) -> Result<Value, RpcError> {
    let Some(method) = table::find(&request.method) else {
        let error = RpcError::new(METHOD_NOT_FOUND, "Method not found");
        return Err(match table::nearest_method(&request.method) {
            Some(near) => error.hint(format!("did you mean {near}?")),
            None => error.hint("rpc_get_methods lists every method"),
        });
    };
    let params = schema::check(method.params, request.params.as_deref())?;
    let work = (method.run)(daemon.clone(), params);
    // What changes something runs to its end, whoever goes away: a half-made object would be worse than an answer
    // nobody reads.
    if !method.only_reads() {
        return work.await;
    }
    tokio::select! {
        answer = work => answer,
        () = gone(peer) => Err(RpcError::refused(libc::ECANCELED, "the client went away")),
    }
}

/// Resolves when the peer has closed both directions; one that only ended its own still reads.
async fn gone(peer: &UnixStream) {
    loop {
        tokio::time::sleep(PEER_POLL).await;
        // A stream that takes nothing now is not a closed one, so this must not wait.
        let ready = tokio::time::timeout(Duration::ZERO, peer.ready(Interest::READABLE | Interest::WRITABLE));
        if let Ok(Ok(ready)) = ready.await
            && ready.is_write_closed()
        {
            return;
        }
    }
}
