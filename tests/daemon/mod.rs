//! A daemon of the real binary in a directory of its own, and clients for it.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod host;

use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The longest a test waits for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The subsystem of [`Daemon::configured`] that shows a memory device.
pub const SCRATCH: &str = "nqn.2014-08.org.example:scratch";

const CONFIGURED: &str = r#"
[target]
listen = "127.0.0.1:PORT"

[[device]]
name = "disk0"
uri = "uring:DIR/disk0.img?size=1GiB"

[[device]]
name = "disk1"
uri = "uring:DIR/disk1.img?size=1GiB"

[[device]]
name = "scratch"
uri = "ram:64MiB"

[[pool]]
name = "main"
devices = ["disk0"]
create = true

[[subsystem]]
nqn = "nqn.2014-08.org.example:scratch"
devices = ["scratch"]
"#;

const IN_MEMORY: &str = r#"
[target]
listen = "127.0.0.1:PORT"

[[device]]
name = "disk0"
uri = "ram:16GiB"

[[pool]]
name = "main"
devices = ["disk0"]
create = true
"#;

/// A running daemon; killed when dropped.
pub struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
    config: Option<PathBuf>,
}

impl Daemon {
    /// Starts `rimrock serve` without a configuration.
    pub fn start() -> Daemon {
        Daemon::start_with(None)
    }

    /// Starts `rimrock serve` with this configuration; `DIR` in it means the daemon's directory.
    pub fn start_with(config: Option<&str>) -> Daemon {
        // Not below /tmp in general: a pool's file needs a filesystem with O_DIRECT.
        let directory = tempfile::Builder::new().prefix("rr").tempdir_in(scratch()).unwrap();
        let config = config.map(|text| {
            let path = directory.path().join("rimrock.toml");
            let text = text.replace("DIR", directory.path().to_str().unwrap());
            std::fs::write(&path, text).unwrap();
            path
        });
        let child = spawn(directory.path(), config.as_deref());
        let mut daemon = Daemon { child, directory, config };
        daemon.wait_until_ready();
        daemon
    }

    /// Starts it with pool `main` on the file `disk0`, the free file `disk1` and the subsystem [`SCRATCH`]. Gives the
    /// port on which it listens, too.
    pub fn configured() -> (Daemon, u16) {
        let port = free_port();
        (Daemon::start_with(Some(&CONFIGURED.replace("PORT", &port.to_string()))), port)
    }

    /// Starts it with pool `main` in 16 GiB of memory.
    pub fn in_memory() -> Daemon {
        Daemon::start_with(Some(&IN_MEMORY.replace("PORT", &free_port().to_string())))
    }

    fn wait_until_ready(&mut self) {
        let started = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(self.socket()) {
                let mut client = Client { stream };
                if client.try_call("spdk_get_version", None).is_some() {
                    return;
                }
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the daemon ended at once, with {status}:\n{}", self.log());
            }
            assert!(started.elapsed() < PATIENCE, "the daemon does not answer:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// Its control socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("rimrock.sock")
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A new connection.
    pub fn client(&self) -> Client {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client { stream }
    }

    /// One call that must succeed.
    pub fn call(&self, method: &str, params: Value) -> Value {
        let answer = self.client().call(method, params);
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    /// One call that must be refused; gives the error object.
    pub fn refused(&self, method: &str, params: Value) -> Value {
        let answer = self.client().call(method, params);
        assert!(answer["result"].is_null() && answer["error"].is_object(), "{method}: {answer}");
        answer["error"].clone()
    }

    /// Runs the command line against it.
    pub fn cli(&self, arguments: &[&str]) -> Output {
        rimrock().arg("--socket").arg(self.socket()).args(arguments).output().unwrap()
    }

    /// Runs a command that must succeed, and gives what it printed.
    pub fn cli_ok(&self, arguments: &[&str]) -> String {
        let output = self.cli(arguments);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {out}{err}");
        out.into_owned()
    }

    /// Ends it with a signal and waits.
    pub fn signal(&mut self, signal: nix::sys::signal::Signal) -> std::process::ExitStatus {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, signal).unwrap();
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < PATIENCE, "the daemon does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it has ended.
    pub fn wait(&mut self) {
        self.child.wait().unwrap();
    }

    /// One call that may find the daemon killed: `None` when no whole answer came, or an error.
    pub fn try_call(&self, method: &str, params: Value) -> Option<Value> {
        let stream = UnixStream::connect(self.socket()).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let answer = Client { stream }.try_call(method, Some(params))?;
        answer["error"].is_null().then(|| answer["result"].clone())
    }

    /// Starts it again in the same directory with the same configuration.
    pub fn restart(&mut self) {
        self.child = spawn(self.directory.path(), self.config.as_deref());
        self.wait_until_ready();
    }

    /// Still there, and answering.
    pub fn assert_alive(&mut self) {
        assert!(self.child.try_wait().unwrap().is_none(), "the daemon ended:\n{}", self.log());
        self.call("spdk_get_version", Value::Null);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(directory: &Path, config: Option<&Path>) -> Child {
    let log = std::fs::OpenOptions::new().create(true).append(true).open(directory.join("log")).unwrap();
    let mut command = rimrock();
    command.arg("--socket").arg(directory.join("rimrock.sock")).arg("serve");
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

/// A directory on a filesystem that takes O_DIRECT.
pub fn scratch() -> PathBuf {
    std::env::var_os("RIMROCK_TEST_DIR").map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from)
}

/// The binary, with an environment that the caller's settings do not reach.
pub fn rimrock() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rimrock"));
    command.env_remove("RIMROCK_SOCKET");
    command
}

/// A TCP port nobody listens on, below the range from which the kernel gives ports to clients, and not given to
/// another test of this process.
pub fn free_port() -> u16 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..1000 {
        let number = std::process::id() * 61 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20_000 + (number % 10_000) as u16;
        // Not by binding it: a process that another thread is just starting would hold the listener for a moment.
        if std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            return port;
        }
    }
    panic!("no free port from 20000 to 29999");
}

/// A connection to the control socket.
pub struct Client {
    /// The socket.
    pub stream: UnixStream,
}

impl Client {
    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// One answer.
    pub fn receive(&mut self) -> Value {
        self.try_receive().expect("an answer")
    }

    fn try_receive(&mut self) -> Option<Value> {
        // One byte at a time, so that nothing behind the answer is taken.
        let mut text = Vec::new();
        let mut byte = [0];
        while self.stream.read(&mut byte).ok()? == 1 {
            text.push(byte[0]);
            if byte[0] == b'\n' {
                return Some(serde_json::from_slice(&text).expect("strict JSON"));
            }
        }
        None
    }

    /// Everything up to the end of the connection.
    pub fn receive_to_end(&mut self) -> String {
        let mut text = Vec::new();
        self.stream.read_to_end(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    /// Calls a method; `Null` parameters are left out.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        let params = (!params.is_null()).then_some(params);
        self.try_call(method, params).expect("an answer")
    }

    fn try_call(&mut self, method: &str, params: Option<Value>) -> Option<Value> {
        let mut request = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
        if let Some(params) = params {
            request["params"] = params;
        }
        self.stream.write_all(request.to_string().as_bytes()).ok()?;
        self.try_receive()
    }
}
