//! Ring links between devices of one process, over real sockets.
#![allow(clippy::unwrap_used, missing_docs)]

mod ringing;

use galaxy_common::{
    Assignment, BlockAssignment, Bytes, Cache, DeviceName, DevicePlan, Epoch, Exchange,
    FrameHeader, LinkType, Mode, Modes, Plan, Rank, SequenceNumber, Span, Strategy, WireType,
};
use galaxy_engine::link::{LinkError, Links};
use galaxy_proto::{channel::ConnectError, identity::Authority};
use galaxy_worker::ring::{Formation, RingError, handshake::HandshakeReply};
use ringing::{RingDevice, device};
use std::{
    io::ErrorKind,
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

fn name(text: &str) -> DeviceName {
    DeviceName::new(text).unwrap()
}

fn plan(names: &[&str]) -> Arc<Plan> {
    let assignment = Assignment {
        blocks: vec![BlockAssignment {
            layers: Span::first(1),
            heads: Span::first(1),
            columns: Span::first(1),
        }],
        row_weight: 1,
        vocabulary: Span::empty(),
    };
    let device = |text: &&str| DevicePlan {
        name: name(text),
        budget: Bytes(0),
        threads: 1,
        prefill: assignment.clone(),
        decode: assignment.clone(),
        streaming: None,
    };
    Arc::new(Plan {
        model: "m".into(),
        fingerprint: "f".into(),
        strategy: Strategy::Galaxy,
        layout: Strategy::Galaxy.layout(),
        modes: Modes::uniform(1, Mode::Tensor),
        exchange: Exchange::Ring,
        link: LinkType::Tls,
        wire: WireType::F32,
        activations: galaxy_common::Activations::default(),
        tiles: 1,
        max_rows: 8,
        cache: Cache::NONE,
        ring: names.iter().map(device).collect(),
    })
}

fn formation(
    plan: &Arc<Plan>,
    peers: &[&RingDevice],
    rank: u16,
    epoch: u64,
    link: LinkType,
) -> Formation {
    let ranks = plan.ring.len() as u16;
    Formation {
        epoch: Epoch(epoch),
        rank: Rank(rank),
        digest: [7; 32],
        plan: plan.clone(),
        peers: peers.iter().map(|device| device.at.clone()).collect(),
        link,
        links: (0..ranks).map(|from| (Rank(from), Rank((from + 1) % ranks))).collect(),
    }
}

async fn pair(epoch: u64, link: LinkType) -> (Links, Links) {
    pair_through(epoch, link, |there| there).await
}

/// A pair of which the first reaches the second at the address that `way` returns.
async fn pair_through(
    epoch: u64,
    link: LinkType,
    way: impl FnOnce(String) -> String,
) -> (Links, Links) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let (a, mut b) = (device(&authority, "a").await, device(&authority, "b").await);
    b.at.address = way(b.at.address);
    let plan = plan(&["a", "b"]);
    let (la, lb) = tokio::join!(
        a.ring.form(&a.identity, formation(&plan, &[&a, &b], 0, epoch, link)),
        b.ring.form(&b.identity, formation(&plan, &[&a, &b], 1, epoch, link)),
    );
    (la.unwrap(), lb.unwrap())
}

fn header(epoch: u64, sequence: u64, payload: usize) -> FrameHeader {
    FrameHeader {
        epoch: Epoch(epoch),
        sequence: SequenceNumber(sequence),
        transfer: 3,
        tile: 1,
        wire: WireType::F32,
        payload: payload as u32,
    }
}

async fn frames_arrive(link: LinkType) {
    let (mut a, mut b) = pair(5, link).await;
    let sizes = [0, 1, 4096, 16 * 1024 + 3, 3 << 20];
    let bytes = |n: usize| (0..n).map(|i| (i * 31 + n) as u8).collect::<Vec<u8>>();
    let sender = thread::spawn(move || {
        let (_, sender) = &mut a.senders[0];
        // Stale ones first: of an older epoch, and of an older program.
        sender.send(&header(4, 900, 70_000), &bytes(70_000)).unwrap();
        sender.send(&header(5, 0, 5), &bytes(5)).unwrap();
        for (i, size) in sizes.iter().enumerate() {
            sender.send(&header(5, 1 + i as u64, *size), &bytes(*size)).unwrap();
        }
        sender.send(&header(5, 100, 1), &[0]).unwrap();
        a
    });
    let receiver = thread::spawn(move || {
        let (_, receiver) = &mut b.receivers[0];
        for (i, size) in sizes.iter().enumerate() {
            let mut payload = vec![0; *size];
            receiver.receive(&header(5, 1 + i as u64, *size), &mut payload).unwrap();
            assert_eq!(payload, bytes(*size));
        }
        // A frame of the future is no frame of ours.
        let error = receiver.receive(&header(5, 99, 1), &mut [0]).unwrap_err();
        assert!(matches!(error, LinkError::Unexpected { .. }), "{error}");
    });
    receiver.join().unwrap();
    sender.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_arrive_over_tls() {
    frames_arrive(LinkType::Tls).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_arrive_over_plain_tcp() {
    frames_arrive(LinkType::Plain).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_arrive_over_quic() {
    frames_arrive(LinkType::Quic).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_a_link_wakes_blocked_senders_and_receivers() {
    for link in LinkType::ALL {
        // The receiver waits for a frame that never comes, and is closed here.
        let (a, mut b) = pair(1, link).await;
        let closers = std::mem::take(&mut b.closers);
        let blocked = thread::spawn(move || {
            b.receivers[0].1.receive(&header(1, 1, 4), &mut [0; 4]).unwrap_err()
        });
        closers.iter().for_each(|closer| closer.close());
        assert!(matches!(blocked.join().unwrap(), LinkError::Closed));
        drop(a);

        // The sender waits for a peer that takes nothing, and is closed at the other end.
        let (mut a, b) = pair(1, link).await;
        let blocked = thread::spawn(move || {
            let payload = vec![0; 1 << 20];
            loop {
                if let Err(error) = a.senders[0].1.send(&header(1, 1, payload.len()), &payload) {
                    return error;
                }
            }
        });
        b.closers.iter().for_each(|closer| closer.close());
        drop(b);
        assert!(matches!(blocked.join().unwrap(), LinkError::Closed));
    }
}

/// Links whose ends show certificates.
const SEALED: [LinkType; 2] = [LinkType::Tls, LinkType::Quic];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_that_arrive_early_wait_for_the_placement() {
    for link in SEALED {
        early_arrivals_wait(link).await;
    }
}

async fn early_arrivals_wait(link: LinkType) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let (a, b) = (device(&authority, "a").await, device(&authority, "b").await);
    let plan = plan(&["a", "b"]);
    // `b` is still in epoch 1, alone, when `a` dials for epoch 2.
    let mut first = formation(&plan, &[&a, &b], 1, 1, link);
    first.links.clear();
    b.ring.form(&b.identity, first).await.unwrap();
    let early = {
        let (ring, identity) = (a.ring.clone(), a.identity.clone());
        let formation = formation(&plan, &[&a, &b], 0, 2, link);
        tokio::spawn(async move { ring.form(&identity, formation).await })
    };
    let late = b.ring.form(&b.identity, formation(&plan, &[&a, &b], 1, 2, link)).await.unwrap();
    let early = early.await.unwrap().unwrap();
    assert_eq!((early.senders.len(), early.receivers.len()), (1, 1));
    assert_eq!((late.senders.len(), late.receivers.len()), (1, 1));
    // Whoever comes for an epoch that is over is told so.
    let error = a.ring.form(&a.identity, formation(&plan, &[&a, &b], 0, 1, link)).await;
    let error = error.err().unwrap();
    let stale = matches!(&error, RingError::Refused { .. }) && error.retryable();
    assert!(stale && error.peer() == &name("b"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_links_of_a_cancelled_epoch_are_rejected_as_stale() {
    for link in SEALED {
        a_cancelled_epoch_is_stale(link).await;
    }
}

async fn a_cancelled_epoch_is_stale(link: LinkType) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let (a, b) = (device(&authority, "a").await, device(&authority, "b").await);
    let plan = plan(&["a", "b"]);
    b.ring.close(Epoch(1));
    let error = a.ring.form(&a.identity, formation(&plan, &[&a, &b], 0, 1, link)).await;
    let error = error.err().unwrap();
    let stale = matches!(&error, RingError::Refused { answer: HandshakeReply::Stale, .. });
    assert!(stale && error.retryable(), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_of_another_name_is_refused() {
    for link in SEALED {
        another_name_is_refused(link).await;
    }
}

async fn another_name_is_refused(link: LinkType) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let (a, b) = (device(&authority, "a").await, device(&authority, "b").await);
    let intruder = device(&authority, "intruder").await;
    let plan = plan(&["a", "b"]);
    let waiting = {
        let (ring, identity) = (b.ring.clone(), b.identity.clone());
        let formation = formation(&plan, &[&a, &b], 1, 1, link);
        tokio::spawn(async move { ring.form(&identity, formation).await })
    };
    // It takes the place of `a`, and says that it is; its certificate says otherwise.
    let posing = formation(&plan, &[&intruder, &b], 0, 1, link);
    let error = intruder.ring.form(&intruder.identity, posing).await.err().unwrap();
    assert!(matches!(error, RingError::Refused { .. }), "{error}");
    assert!(!error.retryable());
    // Dialled where `a` should be, it is known as another, too.
    let plan = self::plan(&["b", "a"]);
    let towards = formation(&plan, &[&b, &intruder], 0, 2, link);
    let error = b.ring.form(&b.identity, towards).await.err().unwrap();
    let wrong = matches!(&error, RingError::Connect { source: ConnectError::WrongName { .. }, .. });
    assert!(wrong, "{error}");
    waiting.abort();
}

/// What happens to a packet.
enum Fate {
    Pass,
    Lose,
    /// The packet and all after it come from another address.
    Move,
}

/// A relay to a device that counts the packets to it, from 0, and decides on each.
fn relay(to: String, mut fate: impl FnMut(u64) -> Fate + Send + 'static) -> String {
    let front = UdpSocket::bind("127.0.0.1:0").unwrap();
    let here = front.local_addr().unwrap().to_string();
    front.set_nonblocking(true).unwrap();
    tokio::spawn(async move {
        let front = tokio::net::UdpSocket::from_std(front).unwrap();
        let back = async |from: &str| {
            let socket = tokio::net::UdpSocket::bind(from).await.unwrap();
            socket.connect(&to).await.unwrap();
            socket
        };
        let (mut behind, mut client) = (back("127.0.0.1:0").await, None);
        let (mut there, mut here) = (vec![0; 2048], vec![0; 2048]);
        for count in 0.. {
            let size = loop {
                tokio::select! {
                    came = front.recv_from(&mut there) => {
                        let (size, from) = came.unwrap();
                        // One connection for each pair: both links come from one socket.
                        assert_eq!(*client.get_or_insert(from), from);
                        break size;
                    }
                    came = behind.recv(&mut here) => {
                        // Whoever is answered has asked.
                        let size = came.unwrap();
                        front.send_to(&here[..size], client.unwrap()).await.unwrap();
                    }
                }
            };
            match fate(count) {
                Fate::Pass => {}
                Fate::Lose => continue,
                Fate::Move => behind = back("127.0.0.2:0").await,
            }
            behind.send(&there[..size]).await.unwrap();
        }
    });
    here
}

/// Sends large frames both ways at once.
fn exchange(a: Links, b: Links, epoch: u64) {
    const FRAMES: u64 = 40;
    let bytes = |n: u64| (0..200_000).map(|i| (i * 31 + n) as u8).collect::<Vec<u8>>();
    let drive = |mut links: Links| {
        let (mut sender, mut receiver) = (links.senders.remove(0).1, links.receivers.remove(0).1);
        let sending = thread::spawn(move || {
            for n in 0..FRAMES {
                let payload = bytes(n);
                sender.send(&header(epoch, n, payload.len()), &payload).unwrap();
            }
            sender
        });
        let receiving = thread::spawn(move || {
            for n in 0..FRAMES {
                let mut payload = vec![0; 200_000];
                receiver.receive(&header(epoch, n, payload.len()), &mut payload).unwrap();
                assert_eq!(payload, bytes(n), "frame {n}");
            }
        });
        (sending, receiving, links)
    };
    let both = [drive(a), drive(b)];
    let senders: Vec<_> = both
        .into_iter()
        .map(|(sending, receiving, links)| {
            receiving.join().unwrap();
            (sending.join().unwrap(), links)
        })
        .collect();
    drop(senders);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_changes_its_address_keeps_its_links() {
    let moved = Arc::new(AtomicU64::new(0));
    let seen = moved.clone();
    let way = move |to| {
        relay(to, move |count| {
            seen.store(count, Ordering::Relaxed);
            // In the middle of frames.
            if count == 500 { Fate::Move } else { Fate::Pass }
        })
    };
    let (a, b) = pair_through(3, LinkType::Quic, way).await;
    tokio::task::spawn_blocking(|| exchange(a, b, 3)).await.unwrap();
    assert!(moved.load(Ordering::Relaxed) > 1000, "it moved while frames were sent");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_that_are_lost_are_sent_again() {
    let way = |to| relay(to, |count| if count % 50 == 49 { Fate::Lose } else { Fate::Pass });
    let (a, b) = pair_through(3, LinkType::Quic, way).await;
    tokio::task::spawn_blocking(|| exchange(a, b, 3)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quic_link_to_a_silent_peer_times_out() {
    let cut = Arc::new(AtomicU64::new(u64::MAX));
    let (seen, set) = (cut.clone(), cut);
    let way = move |to| {
        relay(to, move |count| match count > seen.load(Ordering::Relaxed) {
            true => Fate::Lose,
            false => Fate::Pass,
        })
    };
    let (mut a, b) = pair_through(3, LinkType::Quic, way).await;
    let receiving =
        thread::spawn(move || a.receivers[0].1.receive(&header(3, 1, 4), &mut [0; 4]).unwrap_err());
    set.store(0, Ordering::Relaxed);
    let error = tokio::task::spawn_blocking(|| receiving.join().unwrap()).await.unwrap();
    assert!(matches!(&error, LinkError::Io(e) if e.kind() == ErrorKind::TimedOut), "{error}");
    assert!(error.to_string().contains("said nothing for 4s"), "{error}");
    drop(b);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rings_of_three_form_over_quic() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "home").unwrap();
    let names = ["a", "b", "c"];
    let mut devices = Vec::new();
    for name in names {
        devices.push(device(&authority, name).await);
    }
    let peers: Vec<&RingDevice> = devices.iter().collect();
    let plan = plan(&names);
    // To the next alone, and to everyone.
    for (epoch, everyone) in [(1, false), (2, true)] {
        let form = |rank: u16| {
            let mut formation = formation(&plan, &peers, rank, epoch, LinkType::Quic);
            if everyone {
                let ranks = || (0..3).map(Rank);
                let all = ranks().flat_map(|from| ranks().map(move |to| (from, to)));
                formation.links = all.filter(|(from, to)| from != to).collect();
            }
            let device = peers[rank as usize];
            device.ring.form(&device.identity, formation)
        };
        let (a, b, c) = tokio::join!(form(0), form(1), form(2));
        for links in [a.unwrap(), b.unwrap(), c.unwrap()] {
            let count = if everyone { 2 } else { 1 };
            assert_eq!((links.senders.len(), links.receivers.len()), (count, count));
        }
    }
}
