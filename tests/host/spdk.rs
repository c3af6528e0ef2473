//! SPDK's `nvmf_tgt` as the target: an independent opinion on every byte that the host sends.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rimrock::nvme::nqn;
use serde_json::{Value, json};

use crate::checks::{MIB, NQN, Rig};

pub struct Spdk {
    process: Child,
    rpc: UnixStream,
    _dir: tempfile::TempDir,
    addr: SocketAddr,
}

impl Drop for Spdk {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let spdk_bin = std::env::var_os("SPDK_BIN").map(PathBuf::from);
    std::env::split_paths(&path).chain(spdk_bin).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// The RPC socket of a starting target, or why it does not come.
fn wait_for_socket(process: &mut Child, path: &std::path::Path) -> Result<UnixStream, String> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Ok(rpc) = UnixStream::connect(path) {
            return Ok(rpc);
        }
        if let Ok(Some(status)) = process.try_wait() {
            return Err(format!("nvmf_tgt does not run here: {status}"));
        }
        if Instant::now() > deadline {
            let _ = process.kill();
            let _ = process.wait();
            return Err("nvmf_tgt does not open its RPC socket".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Spdk {
    /// A target with one 64 MiB namespace of 512 byte blocks, or why there is none.
    pub fn start() -> Result<Spdk, String> {
        let program = find("nvmf_tgt").ok_or("nvmf_tgt (SPDK) is not installed")?;
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let socket = dir.path().join("spdk.sock");
        let mut process = Command::new(program)
            .args(["-m", "0x1", "--no-pci", "--disable-cpumask-locks", "--no-huge", "-s", "512", "-r"])
            .arg(&socket)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("nvmf_tgt does not start: {e}"))?;
        let rpc = wait_for_socket(&mut process, &socket)?;
        let addr = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).unwrap();
        let mut spdk = Spdk { process, rpc, _dir: dir, addr };
        spdk.call(
            "bdev_malloc_create",
            json!({"name": "M0", "num_blocks": 64 * MIB / 512, "block_size": 512}),
        );
        spdk.call("bdev_malloc_create", json!({"name": "M1", "num_blocks": 1024, "block_size": 4096}));
        spdk.call("nvmf_create_transport", json!({"trtype": "TCP", "in_capsule_data_size": 4096}));
        spdk.call(
            "nvmf_create_subsystem",
            json!({"nqn": NQN, "allow_any_host": true, "serial_number": "S1"}),
        );
        spdk.call("nvmf_subsystem_add_ns", json!({"nqn": NQN, "namespace": {"bdev_name": "M0"}}));
        let port = addr.port().to_string();
        let address = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port});
        spdk.call("nvmf_subsystem_add_listener", json!({"nqn": NQN, "listen_address": address}));
        spdk.call("nvmf_subsystem_add_listener", json!({"nqn": nqn::DISCOVERY, "listen_address": address}));
        Ok(spdk)
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        self.rpc.write_all(request.to_string().as_bytes()).unwrap();
        let mut bytes = Vec::new();
        loop {
            let mut piece = [0; 65536];
            let n = self.rpc.read(&mut piece).unwrap();
            assert_ne!(n, 0, "nvmf_tgt closed its socket");
            bytes.extend(&piece[..n]);
            if let Ok(answer) = serde_json::from_slice::<Value>(&bytes) {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }
}

impl Rig for Spdk {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn add_second_namespace(&mut self) {
        self.call("nvmf_subsystem_add_ns", json!({"nqn": NQN, "namespace": {"bdev_name": "M1"}}));
    }
}
