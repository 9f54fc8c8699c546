// The chats of this tab: their ids are 128 random bits, known to this tab and the server, and survive a reload.

const STORED = "ttlaunch-chats";

/** The chats of this tab, as stored before a reload, or one that is new. */
export async function loadChats() {
  const stored = read();
  const chats = stored && (await isOurs(stored.tab)) ? stored : null;
  if (chats) return chats;
  const fresh = { tab: randomId(), chats: [newChat()], current: 0 };
  await isOurs(fresh.tab);
  return fresh;
}

/** A chat that nobody has written in. */
export function newChat() {
  return { id: randomId(), title: "" };
}

/** Store the chats for a reload of this tab. */
export function storeChats({ tab, chats, current }) {
  const kept = { tab, chats: chats.map(({ id, title }) => ({ id, title })), current };
  sessionStorage.setItem(STORED, JSON.stringify(kept));
}

function read() {
  try {
    const stored = JSON.parse(sessionStorage.getItem(STORED));
    return stored?.chats?.[stored.current] ? stored : null;
  } catch {
    return null;
  }
}

// A browser copies the storage of a tab when the user duplicates the tab. The first one holds a lock for as long as it is
// open; a copy does not get it and begins with a chat of its own. A page that is being left may hold it for a moment longer.
function isOurs(tab) {
  if (!navigator.locks) return Promise.resolve(true); // browsers have locks only over HTTPS and on this machine
  const tooLate = AbortSignal.timeout(2000);
  return new Promise((resolve) => {
    const hold = () => {
      resolve(true);
      return new Promise(() => {});
    };
    navigator.locks.request(`ttlaunch-tab-${tab}`, { signal: tooLate }, hold).catch(() => resolve(false));
  });
}

function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
