//! The discovery service.

use std::net::SocketAddr;

use rimrock::target::SubsystemSpec;

use crate::client::*;

const FIRST: &str = "nqn.2024-01.io.rimrock:s1";
const SECOND: &str = "nqn.2024-01.io.rimrock:s2";

fn discover(addr: SocketAddr, host: &str) -> Wire {
    let mut wire = Wire::open(addr);
    wire.handshake();
    wire.connect_admin(DISCOVERY, host).expect_ok();
    wire.enable();
    wire
}

/// Generation and (SUBNQN, TRADDR, TRSVCID) of each entry.
fn log(wire: &mut Wire) -> (u64, Vec<(String, String, String)>) {
    let header = wire.log_page(0x70, 0, 1024, true).expect_ok();
    let genctr = u64::from_le_bytes(header[..8].try_into().unwrap());
    let count = u64::from_le_bytes(header[8..16].try_into().unwrap());
    let mut entries = Vec::new();
    for i in 0..count {
        let entry = wire.log_page(0x70, 1024 + i * 1024, 1024, i + 1 < count).expect_ok();
        let text = |range: std::ops::Range<usize>| {
            String::from_utf8(entry[range].to_vec()).unwrap().trim_end_matches(['\0', ' ']).to_owned()
        };
        assert_eq!((entry[0], entry[2], entry[3] & 3), (3, 2, 2), "TCP, an NVM subsystem, no secure channel");
        assert_eq!(entry[6..8], [0xFF, 0xFF], "CNTLID");
        entries.push((text(256..512), text(512..768), text(32..64)));
    }
    (genctr, entries)
}

#[test]
fn a_host_sees_what_it_may_use() {
    let rig = Rig::start();
    for (nqn, host) in [(FIRST, HOSTNQN), (SECOND, OTHER_HOST)] {
        rig.target.create_subsystem(SubsystemSpec::new(nqn)).unwrap();
        rig.ask(move |target, addr| async move { target.add_listener(nqn, addr).await });
        rig.target.add_host(nqn, host).unwrap();
    }
    let entry = |nqn: &str| (nqn.to_owned(), "127.0.0.1".to_owned(), rig.addr.port().to_string());
    let mut wire = discover(rig.addr, HOSTNQN);
    assert_eq!(log(&mut wire).1, [entry(FIRST), entry(SUBNQN)]);
    assert_eq!(log(&mut discover(rig.addr, OTHER_HOST)).1, [entry(SECOND), entry(SUBNQN)]);
    // One subsystem, two addresses: two entries.
    let second = listen(&rig.target, SUBNQN);
    let entries = log(&mut wire).1;
    assert_eq!(entries.iter().filter(|e| e.0 == SUBNQN).count(), 2);
    assert!(entries.contains(&(SUBNQN.into(), "127.0.0.1".into(), second.port().to_string())));
}

#[test]
fn events_go_to_the_hosts_whose_view_has_changed() {
    let rig = Rig::start();
    rig.target.create_subsystem(SubsystemSpec::new(FIRST)).unwrap();
    rig.ask(|target, addr| async move { target.add_listener(FIRST, addr).await });
    let mut concerned = discover(rig.addr, HOSTNQN);
    let mut other = discover(rig.addr, OTHER_HOST);
    let mut waiting = Vec::new();
    for wire in [&mut concerned, &mut other] {
        assert!(wire.set_feature(0x0B, 1 << 31).ok());
        waiting.push(wire.submit(Sqe::new(0x0C, 0), &[]));
    }
    let before = log(&mut concerned).0;
    rig.target.add_host(FIRST, HOSTNQN).unwrap();
    let event = concerned.complete(&[]);
    assert_eq!((event.cid, event.result), (waiting[0], 0x0070_F002));
    // Held back until the log was read.
    let again = concerned.submit(Sqe::new(0x0C, 0), &[]);
    rig.ask(|target, _| async move { target.remove_host(FIRST, HOSTNQN).await });
    let (after, entries) = log(&mut concerned);
    assert!(after > before && entries.len() == 1);
    rig.target.add_host(FIRST, HOSTNQN).unwrap();
    let event = concerned.complete(&[]);
    assert_eq!((event.cid, event.result), (again, 0x0070_F002));
    // The other host has heard nothing: the next thing it gets is the answer to its own command.
    assert!(other.command(Sqe::new(0x18, 0), &[]).ok());
    assert_eq!(log(&mut other).1.len(), 1);
}

#[test]
fn a_wildcard_listener_is_shown_as_the_address_the_host_used() {
    let rig = Rig::start();
    rig.target.create_subsystem(SubsystemSpec { allow_any_host: true, ..SubsystemSpec::new(FIRST) }).unwrap();
    let mut port = 0;
    for _ in 0..50 {
        port = std::net::TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
        let (target, addr) = (rig.target.clone(), SocketAddr::from(([0, 0, 0, 0], port)));
        if rimrock::reactor::block_on(async move { target.add_listener(FIRST, addr).await }).is_ok() {
            break;
        }
    }
    for ip in ["127.0.0.1", "127.0.0.2"] {
        let addr: SocketAddr = format!("{ip}:{port}").parse().unwrap();
        let entries = log(&mut discover(addr, HOSTNQN)).1;
        let entry = entries.iter().find(|e| e.0 == FIRST).unwrap();
        assert_eq!((&*entry.1, &*entry.2), (ip, &*port.to_string()));
        let mut wire = Wire::open(format!("{}:{}", entry.1, entry.2).parse().unwrap());
        wire.handshake();
        assert!(wire.connect_admin(FIRST, HOSTNQN).ok(), "what is shown can be used");
    }
}

#[test]
fn the_discovery_controller_is_one_and_lists_no_discovery() {
    let rig = Rig::start();
    let mut wire = discover(rig.addr, HOSTNQN);
    let id = wire.identify(1, 0).expect_ok();
    assert_eq!(id[111], 2, "CNTRLTYPE");
    assert_eq!(std::str::from_utf8(&id[768..1024]).unwrap().trim_end_matches('\0'), DISCOVERY);
    assert!(log(&mut wire).1.iter().all(|entry| entry.0 != DISCOVERY));
    wire.identify(0, 1).expect_refused(0x002);
    wire.log_page(0x02, 0, 512, true).expect_refused(0x109);
    wire.set_feature(0x07, 0).expect_refused(0x002);
    wire.command(Sqe::new(0x80, 0), &[]).expect_refused(0x001);
    // Reading where there is nothing is refused, and a part of the header is fine.
    wire.log_page(0x70, 64 << 10, 1024, true).expect_refused(0x002);
    assert_eq!(wire.log_page(0x70, 0, 16, true).expect_ok().len(), 16);
    // No I/O queue on it.
    let data = Wire::connect_data(wire.cntlid, DISCOVERY.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
    rig.wire().command(Wire::connect_sqe(1, 32, 0), &data).expect_refused(0x182);
    rig.check_health();
}
