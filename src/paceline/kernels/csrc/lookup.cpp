// Lookups in texts: where strings of a few lengths stood last, and the drafts that come of it. What
// draft/text_index.py finds by searching is found here by hash chains, as packers find matches: a
// table for each length says where each string stood last, and a list of each position where the
// string that ends there stood before.
#include <algorithm>
#include <chrono>
#include <deque>
#include <new>
#include <vector>

#include "paceline_native.h"

namespace {

// Of a token, counted from the first one ever; it wraps, which is well while windows are below 2^31.
using Position = uint32_t;

constexpr int32_t END = -1;  // stands behind every finished text; no token id
constexpr size_t KEPT = 4, BRANCH = 2, LATEST = 64;  // as text_index.py has them
constexpr int64_t AHEAD = 32;  // tokens whose entries are fetched together

// Another one in each process: nobody can write a text whose strings meet in one place of a table.
const uint64_t BASE =
    (static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) * 0x9e3779b97f4a7c15u ^
     0xd1342543de82ef95u) | 1;

uint64_t rolled(uint64_t hash, int32_t token) { return hash * BASE + static_cast<uint32_t>(token) + 1; }

uint32_t tag_of(uint64_t hash) {
  hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
  uint32_t tag = static_cast<uint32_t>(hash >> 32);
  return tag ? tag : 1;
}

struct Entry {
  Position behind;  // the latest occurrence that goes on
  uint32_t tag;  // 0: free
};

// Strings of one length.
struct Level {
  int64_t length;
  uint64_t power = 1;  // what the token has that leaves the window
  uint64_t hash = 0;  // of the text's last ones
  std::vector<Entry> table;
  size_t used = 0;
  std::vector<Position> before;  // each position's previous one, itself: none

  explicit Level(int64_t tokens) : length(tokens) {
    for (int64_t i = 0; i < tokens; i++) power *= BASE;
  }

  size_t mask() const { return table.size() - 1; }

  void reserve(size_t strings) {
    if (strings * 4 <= table.size() * 3) return;
    size_t size = std::max<size_t>(table.size(), 64);
    while (strings * 4 > size * 3) size *= 2;
    std::vector<Entry> larger(size, Entry{0, 0});
    for (const Entry& entry : table)
      if (entry.tag) {
        size_t i = entry.tag & (size - 1);
        while (larger[i].tag) i = (i + 1) & (size - 1);
        larger[i] = entry;
      }
    table.swap(larger);
  }

  // Others that came to lie behind it move up.
  void erase(size_t hole) {
    used--;
    for (size_t i = (hole + 1) & mask(); table[i].tag; i = (i + 1) & mask())
      if (((i - table[i].tag) & mask()) >= ((i - hole) & mask())) {
        table[hole] = table[i];
        hole = i;
      }
    table[hole].tag = 0;
  }
};

struct Draft {
  std::vector<int32_t> tokens, parents;
  double score = 0;
  int64_t match = 0;

  int32_t add(int32_t token, int32_t parent) {
    tokens.push_back(token);
    parents.push_back(parent);
    return static_cast<int32_t>(tokens.size()) - 1;
  }

  int32_t child(int32_t parent, int32_t token) const {
    for (size_t i = static_cast<size_t>(parent + 1); i < tokens.size(); i++)
      if (parents[i] == parent && tokens[i] == token) return static_cast<int32_t>(i);
    return -1;
  }

  void tell(int32_t* out) const {
    out[0] = static_cast<int32_t>(tokens.size());
    out[1] = static_cast<int32_t>(match);
    std::copy(parents.begin(), parents.end(), std::copy(tokens.begin(), tokens.end(), out + 2));
  }
};

struct Candidate {
  double chance;
  int32_t parent, token;
  int64_t depth;
  size_t first, count;  // its positions among `places`
};

struct Following {
  int32_t token;
  size_t count;
};

// What a lookup works with, kept from one to the next: a search takes less time than its allocations.
struct Scratch {
  std::vector<uint32_t> tags;  // of the levels
  std::vector<Position> found, going, places;
  std::vector<int64_t> lengths;
  std::vector<Following> following;
  std::vector<Candidate> candidates;
  std::vector<size_t> heap;  // of their numbers: those that came first among equals
};
thread_local Scratch scratch;

struct Index {
  const pl_lookup rule;
  std::vector<Level> levels;  // shortest first
  std::vector<int32_t> stream = std::vector<int32_t>(64);  // a ring; each finished text with an END
  Position base = 0, end = 0;
  int64_t open = 0;  // tokens of the text that still grows
  std::deque<int64_t> finished;  // lengths, oldest first

  explicit Index(const pl_lookup& given) : rule(given) {
    for (int64_t i = 0; i < given.count; i++) {
      levels.emplace_back(given.lengths[i]);
      levels.back().before.resize(stream.size());
    }
  }

  int32_t at(Position p) const { return stream[p & (stream.size() - 1)]; }
  int32_t& at(Position p) { return stream[p & (stream.size() - 1)]; }
  bool held(Position p) const { return static_cast<Position>(p - base) < static_cast<Position>(end - base); }

  // -- growing and shrinking ------------------------------------------------------------------

  // All memory that so many tokens and an END take: what comes after this cannot fail.
  void reserve(int64_t count) {
    size_t size = stream.size(), wanted = static_cast<Position>(end - base) + static_cast<size_t>(count) + 1;
    for (Level& level : levels) level.reserve(level.used + static_cast<size_t>(count));
    if (wanted <= size) return;
    while (size < wanted) size *= 2;
    auto widen = [&](auto& ring) {
      auto wider = ring;
      wider.resize(size);
      for (Position p = base; p != end; p++) wider[p & (size - 1)] = ring[p & (ring.size() - 1)];
      ring.swap(wider);
    };
    for (Level& level : levels) widen(level.before);
    widen(stream);
  }

  void extend(const int32_t* tokens, int64_t count) {
    reserve(count);
    for (int64_t i = 0; i < count; i++) at(end + static_cast<Position>(i)) = tokens[i];
    for (Level& level : levels)
      for (int64_t done = 0; done < count; done += AHEAD) read(level, done, std::min(AHEAD, count - done));
    end += static_cast<Position>(count);
    open += count;
  }

  // The strings of a level with which tokens from the text's end + `done` on continue.
  void read(Level& level, int64_t done, int64_t count) {
    uint32_t tags[AHEAD];
    Position first = end + static_cast<Position>(done);
    int64_t place = open + done;
    for (int64_t i = 0; i < count; i++) {
      tags[i] = tag_of(level.hash);
      __builtin_prefetch(&level.table[tags[i] & level.mask()]);
      roll(level, first + static_cast<Position>(i), place + i);
    }
    for (int64_t i = 0; i < count; i++)
      if (place + i >= std::max(level.length, rule.first) && place + i < rule.stop)
        note(level, first + static_cast<Position>(i), tags[i]);
  }

  // The token at p, the text's `place`-th, comes into the window of a level.
  void roll(Level& level, Position p, int64_t place) const {
    level.hash = rolled(level.hash, at(p));
    if (place >= level.length) {
      uint32_t left = static_cast<uint32_t>(at(p - static_cast<Position>(level.length)));
      level.hash -= (static_cast<uint64_t>(left) + 1) * level.power;
    }
  }

  void note(Level& level, Position p, uint32_t tag) {
    size_t i = tag & level.mask();
    Position& before = level.before[p & (stream.size() - 1)];
    for (; level.table[i].tag; i = (i + 1) & level.mask())
      if (level.table[i].tag == tag && common(level.table[i].behind, p, level.length) == level.length) {
        before = level.table[i].behind;
        level.table[i].behind = p;
        return;
      }
    level.table[i] = {p, tag};
    level.used++;
    before = p;
  }

  // Tokens, at most so many, that stand alike in front of two positions of texts.
  int64_t common(Position p, Position q, int64_t most) const {
    int64_t length = 0;
    while (length < most && at(--p) == at(--q)) length++;
    return length;
  }

  void finish() {
    if (!open) return;
    reserve(0);
    finished.push_back(open);
    at(end++) = END;
    open = 0;
    for (Level& level : levels) level.hash = 0;
  }

  int64_t drop_oldest() {
    int64_t length = finished.front();
    finished.pop_front();
    for (Level& level : levels) {
      uint64_t hash = level.hash;
      level.hash = 0;
      for (int64_t place = 0; place < length; place++) {
        Position p = base + static_cast<Position>(place);
        if (place >= level.length) forget(level, p, tag_of(level.hash));
        roll(level, p, place);
      }
      level.hash = hash;
    }
    base += static_cast<Position>(length) + 1;
    return length;
  }

  // A string whose latest occurrence is the oldest has no others.
  static void forget(Level& level, Position p, uint32_t tag) {
    for (size_t i = tag & level.mask(); level.table[i].tag; i = (i + 1) & level.mask())
      if (level.table[i].tag == tag && level.table[i].behind == p) return level.erase(i);
  }

  // -- looking up -----------------------------------------------------------------------------

  using Text = std::vector<int32_t>;

  // Tokens of a text's end that stand in front of a position.
  int64_t common(const Text& text, Position p, int64_t most) const {
    int64_t length = 0;
    most = std::min(most, static_cast<int64_t>(text.size()));
    while (length < most && held(--p) && at(p) == text[text.size() - 1 - static_cast<size_t>(length)]) length++;
    return length;
  }

  // What the strings of each level are found by, of a text's last tokens; their entries are on the way then.
  void find(const Text& text) const {
    uint64_t hash = 0, power = 1;
    int64_t length = 0;
    scratch.tags.resize(levels.size());
    for (size_t i = 0; i < levels.size(); i++) {
      if (text.size() < static_cast<size_t>(levels[i].length)) return;
      for (; length < levels[i].length; length++, power *= BASE)
        hash += power * (static_cast<uint64_t>(static_cast<uint32_t>(*(text.end() - 1 - length))) + 1);
      scratch.tags[i] = tag_of(hash);
      if (levels[i].used) __builtin_prefetch(&levels[i].table[scratch.tags[i] & levels[i].mask()]);
    }
  }

  // Positions behind the last occurrences of a text's last tokens, latest first.
  void latest(size_t number, const Text& text, size_t most, std::vector<Position>& found) const {
    const Level& level = levels[number];
    const uint32_t tag = scratch.tags[number];
    if (text.size() < static_cast<size_t>(level.length) || !level.used) return;
    for (size_t i = tag & level.mask(); level.table[i].tag; i = (i + 1) & level.mask()) {
      Position p = level.table[i].behind;
      if (level.table[i].tag != tag || common(text, p, level.length) < level.length) continue;
      for (size_t count = 0; count < most && held(p); count++) {
        found.push_back(p);
        Position before = level.before[p & (stream.size() - 1)];
        if (before == p) return;
        p = before;
      }
      return;
    }
  }

  Draft ngrams(const Text& text, int64_t deep, size_t nodes) const {
    Draft draft;
    std::vector<Position>&found = scratch.found, &all = scratch.places;
    all.clear();
    find(text);
    for (size_t i = levels.size(); i-- > 0;) {
      found.clear();
      latest(i, text, KEPT, found);
      if (!found.empty() && !draft.match) draft.match = levels[i].length;
      for (Position p : found) {
        if (std::find(all.begin(), all.end(), p) != all.end()) continue;
        all.push_back(p);
        Position period = end - p;  // past the end it repeats: a loop stays a loop
        size_t known = draft.tokens.size();
        int32_t node = -1;
        for (Position step = 0; step < static_cast<Position>(deep); step++) {
          int32_t token = at(p + step % period), next = draft.child(node, token);
          if (next < 0) {
            if (draft.tokens.size() >= nodes) return draft;
            if (all.size() > 1 && draft.tokens.size() - known >= BRANCH) break;
            next = draft.add(token, node);
          }
          node = next;
        }
      }
    }
    return draft;
  }

  // The latest occurrences of the longest suffix found, see text_index.py; returns its length.
  int64_t longest(const Text& text, std::vector<Position>& found) const {
    int64_t best = 0;
    found.clear();
    find(text);
    for (size_t i = levels.size(); i-- > 0 && found.empty();) latest(i, text, LATEST, found);
    std::vector<int64_t>& lengths = scratch.lengths;
    lengths.clear();
    for (Position p : found) {
      lengths.push_back(common(text, p, rule.depth));
      best = std::max(best, lengths.back());
    }
    size_t kept = 0;
    for (size_t i = 0; i < found.size(); i++)
      if (lengths[i] == best) found[kept++] = found[i];
    found.resize(kept);
    return best;
  }

  Draft suffixes(Text text, int64_t deep, size_t nodes) const {
    Draft draft;
    std::vector<Position>&going = scratch.going, &places = scratch.places;
    std::vector<Following>& following = scratch.following;
    std::vector<Candidate>& candidates = scratch.candidates;
    std::vector<size_t>& heap = scratch.heap;
    places.clear();
    candidates.clear();
    heap.clear();
    draft.match = longest(text, going);
    if (!draft.match) return draft;
    double allowed = rule.factor * static_cast<double>(draft.match) + rule.offset;
    if (allowed < static_cast<double>(nodes)) nodes = static_cast<size_t>(allowed);
    auto later = [&](size_t a, size_t b) {
      double one = candidates[a].chance, other = candidates[b].chance;
      return one != other ? one < other : a > b;
    };
    const size_t known = text.size();
    Candidate at_hand{1.0, -1, 0, 0, 0, 0};
    int32_t node = -1;
    while (draft.tokens.size() < nodes) {
      if (at_hand.depth < deep) {
        going.erase(std::remove_if(going.begin(), going.end(), [&](Position p) { return !held(p) || at(p) == END; }),
                    going.end());
        if (going.empty()) {  // where the text ends: as if the path were appended
          text.resize(known + static_cast<size_t>(at_hand.depth));
          for (int32_t up = node, i = static_cast<int32_t>(text.size()); up >= 0; up = draft.parents[up])
            text[static_cast<size_t>(--i)] = draft.tokens[up];
          longest(text, going);
        }
        following.clear();
        for (Position p : going) {
          size_t i = 0;
          while (i < following.size() && following[i].token != at(p)) i++;
          if (i == following.size()) following.push_back({at(p), 0});
          following[i].count++;
        }
        auto chance = [&](const Following& next) {
          return at_hand.chance * (static_cast<double>(next.count) / static_cast<double>(going.size()));
        };
        following.erase(std::remove_if(following.begin(), following.end(),
                                       [&](const Following& next) { return chance(next) < rule.min_prob; }),
                        following.end());
        std::stable_sort(following.begin(), following.end(),
                         [](const Following& a, const Following& b) { return a.count > b.count; });
        for (const Following& next : following) {
          heap.push_back(candidates.size());
          candidates.push_back({chance(next), node, next.token, at_hand.depth + 1, places.size(), next.count});
          for (Position p : going)
            if (at(p) == next.token) places.push_back(p + 1);
          std::push_heap(heap.begin(), heap.end(), later);
        }
      }
      if (heap.empty()) break;
      std::pop_heap(heap.begin(), heap.end(), later);
      at_hand = candidates[heap.back()];
      heap.pop_back();
      auto first = places.begin() + static_cast<std::ptrdiff_t>(at_hand.first);
      going.assign(first, first + static_cast<std::ptrdiff_t>(at_hand.count));
      node = draft.add(at_hand.token, at_hand.parent);
      draft.score += at_hand.chance;
    }
    return draft;
  }

  // A question: levels, nodes, fresh tokens, tokens of the text's end if more than these is missing.
  Text asked(const int32_t* ask) {
    extend(ask + 4, ask[2]);
    if (ask[3]) return Text(ask + 4 + ask[2], ask + 4 + ask[2] + ask[3]);
    int64_t longest = levels.empty() ? 0 : levels.back().length;
    int64_t count = std::min<int64_t>(open, std::max(rule.depth, longest));
    Text text(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; i++) text[static_cast<size_t>(i)] = at(end - static_cast<Position>(count - i));
    return text;
  }
};

template <class F>
int outcome(void* index, const F& work) {
  try {
    work(*static_cast<Index*>(index));
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

void* pl_index_open(const pl_lookup* rule) {
  try {
    return new Index(*rule);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pl_index_close(void* index) { delete static_cast<Index*>(index); }

int pl_index_extend(void* index, const int32_t* tokens, int64_t count) {
  return outcome(index, [&](Index& own) { own.extend(tokens, count); });
}

int pl_index_finish(void* index) {
  return outcome(index, [](Index& own) { own.finish(); });
}

int64_t pl_index_drop_oldest(void* index) { return static_cast<Index*>(index)->drop_oldest(); }

int64_t pl_index_stream(void* index, int32_t* out) {
  const Index& own = *static_cast<Index*>(index);
  for (Position p = own.base; out && p != own.end; p++) *out++ = own.at(p);
  return static_cast<Position>(own.end - own.base);
}

int64_t pl_index_bytes(void* index) {
  const Index& own = *static_cast<Index*>(index);
  size_t bytes = sizeof(Index) + own.stream.size() * sizeof(int32_t);
  for (const Level& level : own.levels)
    bytes += level.table.size() * sizeof(Entry) + level.before.size() * sizeof(Position);
  return static_cast<int64_t>(bytes);
}

int pl_ngrams(void* index, const int32_t* ask, int32_t* out) {
  return outcome(index, [&](Index& own) {
    own.ngrams(own.asked(ask), ask[0], static_cast<size_t>(ask[1])).tell(out);
  });
}

int pl_suffixes(void* index, void* memory, const int32_t* ask, int32_t* out) {
  return outcome(index, [&](Index& own) {
    Index::Text text = own.asked(ask);
    Draft best = own.suffixes(text, ask[0], static_cast<size_t>(ask[1]));
    if (memory) {
      Draft other = static_cast<Index*>(memory)->suffixes(text, ask[0], static_cast<size_t>(ask[1]));
      if (other.score > best.score) best = std::move(other);
    }
    best.tell(out);
  });
}
}
