//! The discovery service.

use std::net::SocketAddr;

use rimrock::target::{Referral, SubsystemSpec};

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

/// SUBTYPE, TREQ, EFLAGS, SUBNQN and TRADDR:TRSVCID of each entry.
fn full_log(wire: &mut Wire) -> Vec<(u8, u8, u16, String, String)> {
    let page = wire.log_page(0x70, 0, 16384, false).expect_ok();
    let count = u64::from_le_bytes(page[8..16].try_into().unwrap()) as usize;
    let text =
        |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap().trim_end_matches(['\0', ' ']).to_owned();
    let entries = page[1024..].chunks(1024).take(count);
    let view = entries.map(|entry| {
        assert_eq!((entry[0], &entry[6..8]), (3, &[0xFF, 0xFF][..]), "TRTYPE, CNTLID");
        let address = format!("{}:{}", text(&entry[512..768]), text(&entry[32..64]));
        (entry[2], entry[3], u16::from_le_bytes([entry[10], entry[11]]), text(&entry[256..512]), address)
    });
    view.collect()
}

fn refer(addr: &str, nqn: &str, secure_channel: bool) -> Referral {
    Referral { addr: addr.parse().unwrap(), nqn: nqn.to_owned(), secure_channel }
}

#[test]
fn an_address_of_discovery_itself_leads_to_the_same_log() {
    let rig = Rig::start();
    let own = listen(&rig.target, DISCOVERY);
    let mut wire = discover(own, HOSTNQN);
    let nvm = (2, 6, 0, SUBNQN.to_owned(), rig.addr.to_string());
    // DUPRETINFO and EPCSD: nobody need follow it, and whoever is there may stay.
    assert_eq!(full_log(&mut wire), [(3, 6, 3, DISCOVERY.to_owned(), own.to_string()), nvm.clone()]);
    assert_eq!(full_log(&mut discover(rig.addr, HOSTNQN)), full_log(&mut wire));
    // It stays with Keep Alive, however often the log changes, and its entries do not pile up.
    wire.set_feature(0x0B, 1 << 31).expect_ok();
    for _ in 0..10 {
        wire.submit(Sqe::new(0x0C, 0), &[]);
        rig.target
            .create_subsystem(SubsystemSpec { allow_any_host: true, ..SubsystemSpec::new(FIRST) })
            .unwrap();
        rig.ask(|target, addr| async move { target.add_listener(FIRST, addr).await });
        assert_eq!(wire.complete(&[]).result, 0x0070_F002);
        assert_eq!(full_log(&mut wire).len(), 3);
        wire.submit(Sqe::new(0x0C, 0), &[]);
        rig.ask(|target, _| async move { target.delete_subsystem(FIRST).await });
        assert_eq!(wire.complete(&[]).result, 0x0070_F002);
        assert_eq!(full_log(&mut wire).len(), 2);
        assert!(wire.command(Sqe::new(0x18, 0), &[]).ok(), "keep alive");
    }
    rig.ask(move |target, _| async move { target.remove_listener(DISCOVERY, own).await });
    assert_eq!(full_log(&mut discover(rig.addr, HOSTNQN)), [nvm]);
    rig.check_health();
}

#[test]
fn referrals_name_other_places_to_ask() {
    let rig = Rig::start();
    let mut wire = discover(rig.addr, HOSTNQN);
    wire.set_feature(0x0B, 1 << 31).expect_ok();
    wire.submit(Sqe::new(0x0C, 0), &[]);
    rig.target.add_referral(refer("192.0.2.7:8009", DISCOVERY, false)).unwrap();
    assert_eq!(wire.complete(&[]).result, 0x0070_F002);
    rig.target.add_referral(refer("[2001:db8::7]:4420", SECOND, true)).unwrap();
    // Once more is nothing new.
    rig.target.add_referral(refer("192.0.2.7:8009", DISCOVERY, false)).unwrap();
    let nvm = (2, 6, 0, SUBNQN.to_owned(), rig.addr.to_string());
    let first = (1, 6, 0, DISCOVERY.to_owned(), "192.0.2.7:8009".to_owned());
    let second = (2, 5, 0, SECOND.to_owned(), "2001:db8::7:4420".to_owned());
    assert_eq!(full_log(&mut wire), [nvm.clone(), first, second.clone()]);
    assert!(!rig.target.remove_referral("192.0.2.7:8009".parse().unwrap(), SECOND), "another name");
    assert!(rig.target.remove_referral("192.0.2.7:8009".parse().unwrap(), DISCOVERY));
    assert_eq!(full_log(&mut wire), [nvm.clone(), second]);
    assert!(rig.target.add_referral(refer("192.0.2.7:8009", "no name", false)).is_err());
    assert!(rig.target.remove_referral("[2001:db8::7]:4420".parse().unwrap(), SECOND));
    assert_eq!(full_log(&mut wire), [nvm]);
    assert!(rig.target.referrals().is_empty());
}

#[test]
fn a_log_that_is_read_in_pieces_is_one_log() {
    let rig = Rig::start();
    let name = |i: u32| format!("nqn.2024-01.io.rimrock:many-{i:03}");
    for i in 0..40 {
        rig.target
            .create_subsystem(SubsystemSpec { allow_any_host: true, ..SubsystemSpec::new(name(i)) })
            .unwrap();
        rig.ask(|target, addr| async move { target.add_listener(&name(i), addr).await });
    }
    let mut wire = discover(rig.addr, HOSTNQN);
    let whole = wire.log_page(0x70, 0, 64 << 10, true).expect_ok();
    let mut pieces = Vec::new();
    for piece in 0..21u32 {
        pieces.extend(wire.log_page(0x70, u64::from(piece) * 2048, 2048, true).expect_ok());
        // The log loses an entry between two pieces: nothing slips.
        rig.ask(|target, _| async move { target.delete_subsystem(&name(piece)).await });
    }
    assert_eq!(pieces[..42 << 10], whole[..42 << 10]);
    let after = wire.log_page(0x70, 0, 64 << 10, true).expect_ok();
    assert_ne!(after[..8], whole[..8], "GENCTR");
    assert_eq!(u64::from_le_bytes(after[8..16].try_into().unwrap()), 20);
}

#[test]
fn discovery_takes_the_hosts_keep_alive_time_and_lasts_without_one() {
    let rig = Rig::start();
    for kato in [0, 1, 5000, 30_000, 120_000, u32::MAX] {
        let mut wire = rig.wire();
        let data = Wire::connect_data(0xFFFF, DISCOVERY.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
        wire.command(Wire::connect_sqe(0, 32, kato), &data).expect_ok();
        wire.enable();
        let id = wire.identify(1, 0).expect_ok();
        assert_eq!(u32::from_le_bytes(id[92..96].try_into().unwrap()), 1 << 31, "OAES");
        assert_eq!(id[320..322], [1, 0], "KAS");
        assert!(wire.command(Sqe::new(0x18, 0), &[]).ok());
        assert_eq!(wire.get_feature(0x0F).result, u64::from(kato.div_ceil(100).min(u32::MAX / 100)) * 100);
    }
}
