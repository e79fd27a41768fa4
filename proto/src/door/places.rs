//! Which connections may wait in a door, and which may come in: the policy, without sockets and clocks.
//!
//! A [`Lobby`] has the connections that have not shown who they are. It is never closed: where it is full, one goes
//! for each that comes, so that nobody can shut others out by waiting. [`Seats`] are for peers that are known, and
//! each peer has a limited number of them.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

/// A point in time, as the time since the server started.
pub type Now = Duration;

/// How long a connection may be silent before it has to go ahead of older ones that have sent something: more than an
/// honest one takes to send its first bytes over a slow link.
const GRACE: Duration = Duration::from_millis(600);

/// The address by which machines are counted: those of one IPv6 network count as one.
pub fn counted(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
            Some(v4) => IpAddr::V4(v4),
            None => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
        },
    }
}

/// A connection in a lobby.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Guest(u64);

#[derive(Debug)]
struct Waiting {
    address: IpAddr,
    since: Now,
    heard: bool,
}

/// Connections whose peers have not shown who they are.
#[derive(Debug)]
pub struct Lobby {
    most: usize,
    next: u64,
    /// The waiting connections, by their order of arrival.
    waiting: BTreeMap<Guest, Waiting>,
    by_address: HashMap<IpAddr, usize>,
}

impl Lobby {
    /// A lobby for so many connections.
    pub fn new(most: usize) -> Self {
        Self { most: most.max(1), next: 0, waiting: BTreeMap::new(), by_address: HashMap::new() }
    }

    /// Takes in a connection. Where there is no room, it also names the one that has to go: from the address that has
    /// the most connections here, the one that has been silent for longest, and among those that have just come or
    /// have sent something, the one that has been here for longest.
    pub fn arrive(&mut self, now: Now, address: IpAddr) -> (Guest, Option<Guest>) {
        let address = counted(address);
        let goes = if self.waiting.len() >= self.most { self.last_in_line(now) } else { None };
        if let Some(goes) = goes {
            self.leave(goes);
        }
        let guest = Guest(self.next);
        self.next += 1;
        self.waiting.insert(guest, Waiting { address, since: now, heard: false });
        *self.by_address.entry(address).or_default() += 1;
        (guest, goes)
    }

    /// Notes that bytes came from a connection.
    pub fn heard(&mut self, guest: Guest) {
        if let Some(waiting) = self.waiting.get_mut(&guest) {
            waiting.heard = true;
        }
    }

    /// Removes a connection: its peer is known now, or it is gone.
    pub fn leave(&mut self, guest: Guest) {
        let Some(waiting) = self.waiting.remove(&guest) else { return };
        if let Some(count) = self.by_address.get_mut(&waiting.address) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&waiting.address);
            }
        }
    }

    /// The number of connections in the lobby.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether the lobby is empty.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn last_in_line(&self, now: Now) -> Option<Guest> {
        let most = self.by_address.values().max()?;
        let busiest = |w: &Waiting| self.by_address.get(&w.address) == Some(most);
        let silent = |w: &Waiting| !w.heard && now.saturating_sub(w.since) >= GRACE;
        let mut oldest = None;
        for (guest, waiting) in self.waiting.iter().filter(|(_, w)| busiest(w)) {
            if silent(waiting) {
                return Some(*guest);
            }
            oldest = oldest.or(Some(*guest));
        }
        oldest
    }
}

/// How many connections may come in: of all peers together, and of each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdmissionLimits {
    /// The most connections of all peers together.
    pub most: usize,
    /// The most connections of one peer.
    pub each: usize,
}

/// Why there is no place for a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Full {
    /// The peer has as many as one may have.
    #[error("it has {0} connections already, as many as one may have")]
    Each(usize),
    /// All places are taken, or those that are left are for peers that have few.
    #[error("{0} connections stand already")]
    All(usize),
}

/// A peer with fewer connections than this may take the last quarter of all places.
const FEW: usize = 4;

/// The places of peers that are known.
#[derive(Debug)]
pub struct Seats<K> {
    room: AdmissionLimits,
    taken: usize,
    by: HashMap<K, usize>,
}

impl<K: Eq + Hash + Clone> Seats<K> {
    /// So many places, none of them taken.
    pub fn new(room: AdmissionLimits) -> Self {
        Self { room, taken: 0, by: HashMap::new() }
    }

    /// Takes a place for `who`.
    ///
    /// # Errors
    /// When there is no place for it.
    pub fn take(&mut self, who: &K) -> Result<(), Full> {
        let AdmissionLimits { most, each } = self.room;
        let has = self.by.get(who).copied().unwrap_or(0);
        let open = if has < FEW { most } else { most - most / 4 };
        if has >= each {
            return Err(Full::Each(each));
        }
        if self.taken >= open {
            return Err(Full::All(self.taken));
        }
        self.taken += 1;
        *self.by.entry(who.clone()).or_default() += 1;
        Ok(())
    }

    /// Gives back a place that `who` took.
    pub fn give(&mut self, who: &K) {
        let Some(has) = self.by.get_mut(who) else { return };
        *has -= 1;
        self.taken -= 1;
        if *has == 0 {
            self.by.remove(who);
        }
    }

    /// The number of places that are taken.
    pub fn taken(&self) -> usize {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
    const HONEST: Duration = Duration::from_millis(300);

    /// A lobby with 2,500 that came from `of`, silent or half through.
    fn crowded(of: impl Fn(u64) -> IpAddr, heard: bool) -> Lobby {
        let mut lobby = Lobby::new(512);
        for i in 0..2500 {
            let (guest, _) = lobby.arrive(Duration::from_millis(i), of(i));
            if heard {
                lobby.heard(guest);
            }
        }
        lobby
    }

    /// Whether one that comes then, and takes 300 ms, is through before it has to go, while 500 others
    /// come each second.
    fn gets_through(
        lobby: &mut Lobby,
        from: IpAddr,
        of: impl Fn(u64) -> IpAddr,
        heard: bool,
    ) -> bool {
        let begun = Duration::from_secs(3);
        let (honest, _) = lobby.arrive(begun, from);
        for i in 0..150 {
            let now = begun + Duration::from_millis(2 * i);
            let (guest, goes) = lobby.arrive(now, of(i));
            if heard {
                lobby.heard(guest);
            }
            if now >= begun + HONEST / 2 {
                lobby.heard(honest);
            }
            if goes == Some(honest) {
                return false;
            }
        }
        true
    }

    #[test]
    fn an_honest_connection_gets_through_a_crowded_lobby() {
        let many = |i: u64| IpAddr::V4(std::net::Ipv4Addr::from_bits(0x0a01_0000 + i as u32));
        for heard in [false, true] {
            let mut lobby = crowded(|_| OTHER, heard);
            assert!(gets_through(&mut lobby, MINE, |_| OTHER, heard), "another address");
            let mut lobby = crowded(|_| MINE, heard);
            assert!(gets_through(&mut lobby, MINE, |_| MINE, heard), "its own address");
            let mut lobby = crowded(many, heard);
            assert!(gets_through(&mut lobby, MINE, many, heard), "many addresses");
            assert!(lobby.len() <= 512);
        }
    }

    #[test]
    fn a_flood_from_another_address_does_not_evict_a_connection() {
        let mut lobby = crowded(|_| OTHER, true);
        let (honest, goes) = lobby.arrive(Duration::from_secs(3), MINE);
        assert!(goes.is_some());
        for _ in 0..1_000_000 {
            let (_, goes) = lobby.arrive(Duration::from_secs(3), OTHER);
            assert_ne!(goes, Some(honest));
        }
        assert_eq!(lobby.len(), 512);
    }

    #[test]
    fn silent_connections_are_evicted_first_after_their_grace_time() {
        let mut lobby = Lobby::new(2);
        let (slow, _) = lobby.arrive(Duration::ZERO, MINE);
        lobby.heard(slow);
        let (silent, _) = lobby.arrive(Duration::ZERO, MINE);
        let (_, goes) = lobby.arrive(GRACE, MINE);
        assert_eq!(goes, Some(silent));
        let (_, goes) = lobby.arrive(GRACE, MINE);
        assert_eq!(goes, Some(slow), "nobody had less time");
    }

    #[test]
    fn a_connection_that_leaves_frees_its_place() {
        let mut lobby = Lobby::new(1);
        for _ in 0..10 {
            let (guest, goes) = lobby.arrive(Duration::ZERO, MINE);
            assert_eq!(goes, None);
            lobby.leave(guest);
            lobby.leave(guest);
        }
        assert!(lobby.is_empty() && lobby.by_address.is_empty());
    }

    #[test]
    fn addresses_of_one_ipv6_network_count_as_one() {
        let of = |text: &str| counted(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1:2:3"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }

    #[test]
    fn one_identity_cannot_take_the_places_reserved_for_others() {
        let mut seats = Seats::new(AdmissionLimits { most: 256, each: 128 });
        let admitted = (0..300).filter(|_| seats.take(&"one").is_ok()).count();
        assert_eq!(admitted, 128);
        assert_eq!(seats.take(&"one"), Err(Full::Each(128)));
        let admitted = (0..300).filter(|_| seats.take(&"two").is_ok()).count();
        assert_eq!(admitted, 64, "the last quarter is for who has few");
        assert!((0..FEW).all(|_| seats.take(&"honest").is_ok()));
        assert!(seats.take(&"honest").is_err());
        seats.give(&"one");
        assert_eq!(seats.take(&"one"), Err(Full::All(195)));
        seats.give(&"two");
        seats.give(&"nobody");
        assert_eq!(seats.taken(), 194);
    }
}
