//! Rimrock's own target, in this process.

use std::net::{SocketAddr, TcpListener};

use rimrock::device::{Device, OpenOptions};
use rimrock::reactor::{ReactorConfig, Reactors, block_on};
use rimrock::target::{Backend, NamespaceSpec, SubsystemSpec, Target};

use crate::checks::{NQN, Rig};

pub struct Own {
    target: Target,
    addr: SocketAddr,
    /// Last, so that everything else is gone when the reactors stop.
    _reactors: Reactors,
}

impl Own {
    pub fn start() -> Own {
        let reactors = Reactors::start(ReactorConfig { cores: vec![0], ..ReactorConfig::default() }).unwrap();
        let target = Target::new(reactors.handles().to_vec());
        target.create_subsystem(SubsystemSpec { allow_any_host: true, ..SubsystemSpec::new(NQN) }).unwrap();
        add_namespace(&target, "ram:64MiB?block_size=512");
        let addr = listen(&target);
        Own { target, addr, _reactors: reactors }
    }
}

/// Listens on a port that was free a moment ago; somebody may be quicker, then on the next.
fn listen(target: &Target) -> SocketAddr {
    for _ in 0..20 {
        let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let listening = target.clone();
        if block_on(async move { listening.add_listener(NQN, addr).await }).is_ok() {
            return addr;
        }
    }
    panic!("no port to listen on");
}

fn add_namespace(target: &Target, uri: &str) {
    let device = Device::open(uri, OpenOptions::default()).unwrap();
    target.add_namespace(NQN, NamespaceSpec::new(Backend::Device(device), "ram")).unwrap();
}

impl Rig for Own {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn add_second_namespace(&mut self) {
        add_namespace(&self.target, "ram:4MiB");
    }
}
